"""The router: checks a request, makes its prompt, chooses a worker, and hands it over. It never sees the answer."""
