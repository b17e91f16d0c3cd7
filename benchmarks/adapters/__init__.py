"""One module per contender: two engines, and the bare floors that do the same calls."""
