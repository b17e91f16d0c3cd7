"""OpenAI's chat completions: its own API, Azure, Portkey's gateway, and every server that speaks them."""
