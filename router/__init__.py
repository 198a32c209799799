"""The router: checks requests, makes their prompts, and chooses workers. It never sees the answers."""

if __name__ != "tokenbus.router":
    raise ImportError("import tokenbus.router: it is no package of its own")
