"""Tools of servers that speak the Model Context Protocol, by its official SDK."""
