"""The `tokenbus` command."""

if __name__ != "tokenbus.cli":
    raise ImportError("import tokenbus.cli: it is not a package of its own")
