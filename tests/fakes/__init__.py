"""Servers of ours that speak what sandbox vendors speak, and run what they are told to in processes here."""
