"""The router: checks requests, makes their prompts, and chooses workers. It is not in the path of the answers."""

if __name__ != "tokenbus.router":
    raise ImportError("import tokenbus.router: it is not a package of its own")
