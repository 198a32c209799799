"""The router: checks a request, makes its prompt, chooses a worker, and hands it over. It never sees the answer."""

if __name__ != "tokenbus.router":
    raise ImportError("import tokenbus.router: it is no package of its own")
