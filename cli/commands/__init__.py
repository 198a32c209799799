"""The commands of `tokenbus`. Each adds its flags to a parser, with a `run` that returns the exit status."""
