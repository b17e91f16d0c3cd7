"""The models: what a client is, the clients, which one is asked, and when a request may go."""
