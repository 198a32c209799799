"""The checks of what a client's API key allows."""
