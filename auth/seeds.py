"""The file with the private keys of the service: all of its instances have the same."""

import os
from pathlib import Path

from tokenbus.auth import nats_keys
from tokenbus.auth.nats_keys import SealingKey, Signer

_MAX_BYTES = 4_096
_PRIVATE = 0o600
_OTHERS = 0o007
"""A secret of Kubernetes belongs to a group."""


class Seeds:
    """An account's key, whose signature makes users, and the one for which brokers seal their requests."""

    def __init__(self, signer: Signer, sealing: SealingKey) -> None:
        self.signer = signer
        self.sealing = sealing

    def __repr__(self) -> str:
        return f"<Seeds {self.signer.public} {self.sealing.public}>"


def read(path: Path) -> Seeds:
    """Raises ValueError, which shows no seed, for a file that can't be used or that others can read."""
    try:
        with path.open("rb") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & _OTHERS:
                raise ValueError(f"{path} may be read by others: chmod 600 {path}")
            words = file.read(_MAX_BYTES).decode("ascii", "replace").split()
    except OSError as error:
        raise ValueError(f"{path}: the seeds can't be read: {error.strerror}") from error
    try:
        account, curve = words
        return Seeds(Signer(account), SealingKey(curve))
    except ValueError as error:
        raise ValueError(f"{path} must have two lines, as `tokenbus auth-init {path}` makes them") from error


def create(path: Path) -> Seeds:
    """Makes a file with new seeds, which only its owner can read, unless it is there. Raises ValueError."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w") as file:
            file.write(f"{nats_keys.new_seed(nats_keys.ACCOUNT)}\n{nats_keys.new_seed(nats_keys.CURVE)}\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise ValueError(f"{path}: the seeds can't be written: {error.strerror}") from error
    return read(path)
