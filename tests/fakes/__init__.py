"""Servers that speak the protocols of vendors, for their real SDKs."""
