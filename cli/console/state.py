"""The folder for what Tokenbus keeps between runs: logs, the messages typed in chats, cached prefixes."""

import os
from pathlib import Path


def folder(name: str) -> Path:
    """Returns the absolute path of a folder below `$XDG_STATE_HOME/tokenbus`, or `~/.local/state/tokenbus`, which may
    not exist yet."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.abspath(os.path.expanduser(state)), "tokenbus", name)
