"""The `tokenbus` command."""

if __name__ != "tokenbus.cli":
    raise ImportError("import tokenbus.cli: cli is a folder of the repository, not a package of its own")
