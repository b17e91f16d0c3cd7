"""The model that needs no network: it writes and answers by rules."""
