"""The identity of a process at the broker, and the file that proves it."""

import base64
import dataclasses
import itertools
import os
import stat
from pathlib import Path

_JWT_BEGINS = "BEGIN NATS USER JWT"
_SEED_BEGINS = "SU"
"""The seed of a user: an account's begins with SA, an operator's with SO."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a user: the seed of an nkey, and a JWT if an account has issued one."""

    seed: bytes = dataclasses.field(repr=False)
    jwt: str = dataclasses.field(default="", repr=False)

    @property
    def public(self) -> str:
        """The public key. Raises ValueError for an invalid seed."""
        import nkeys  # imports cryptography that most processes don't need

        try:
            return str(nkeys.from_seed(self.seed).public_key.decode())
        except (nkeys.NkeysError, ValueError) as error:
            raise ValueError("not the seed of an nkey") from error

    def sign(self, nonce: str) -> bytes:
        """Signs a broker's nonce, in the form that nats-py sends."""
        import nkeys

        return base64.b64encode(nkeys.from_seed(self.seed).sign(nonce.encode()))


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Credentials in one of NATS's forms; all empty for a broker without authentication."""

    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    token: str = dataclasses.field(default="", repr=False)
    nkey_file: str = ""
    """A file with the seed of an nkey."""
    creds_file: str = ""
    """A file with a user's JWT and seed, in the form that nsc writes."""

    def check(self) -> None:
        """Raises ValueError for more than one form, a user without a password, or an unusable file."""
        given = [bool(self.user), bool(self.token), bool(self.nkey_file), bool(self.creds_file)]
        if sum(given) > 1:
            raise ValueError("give only one of a NATS user, token, nkey file and credentials file")
        if self.user and not self.password:
            raise ValueError(f"the NATS user {self.user} has no password: set the variable TOKENBUS_NATS_PASSWORD")
        self.keys()

    def keys(self) -> Keys | None:
        """Reads the file, if there is one. Raises ValueError, which names the file but reveals none of its content."""
        path = self.creds_file or self.nkey_file
        if not path:
            return None
        lines = _lines(path)
        seed = next((line for line in lines if line.startswith(_SEED_BEGINS)), "")
        keys = Keys(seed.encode(), _jwt_of(lines) if self.creds_file else "")
        try:
            assert keys.public
        except ValueError as error:
            raise ValueError(f"{path} has no seed of a user's nkey: a line of SU and 56 more characters") from error
        if self.creds_file and not keys.jwt:
            raise ValueError(
                f"{path} has no user JWT: nsc writes one beside the seed; pass a seed alone as --nats-nkey"
            )
        return keys


def is_world_readable(path: str) -> bool:
    """Whether every user of this machine can read a file."""
    return os.name == "posix" and os.path.exists(path) and bool(os.stat(path).st_mode & stat.S_IROTH)


def _lines(path: str) -> list[str]:
    try:
        return [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: the NATS credentials can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: NATS credentials must be a text file") from error


def _jwt_of(lines: list[str]) -> str:
    """Returns the line below the JWT's heading, if it looks like a JWT."""
    below = (line for heading, line in itertools.pairwise(lines) if _JWT_BEGINS in heading)
    return next((line for line in below if line.count(".") == 2), "")
