"""Who a process is to the broker, and the file that proves it."""

import base64
import dataclasses
import itertools
import os
import stat
from pathlib import Path

_JWT_BEGINS = "BEGIN NATS USER JWT"
_SEED_BEGINS = "SU"
"""Of a user; an account's begins with SA, an operator's with SO."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """What proves a user: the seed of an nkey, and the JWT of an account where that names the user."""

    seed: bytes = dataclasses.field(repr=False)
    jwt: str = dataclasses.field(default="", repr=False)

    @property
    def public(self) -> str:
        """Raises ValueError for a seed that is none."""
        import nkeys  # with its cryptography: most processes need not wait for it

        try:
            return str(nkeys.from_seed(self.seed).public_key.decode())
        except (nkeys.NkeysError, ValueError) as error:
            raise ValueError("it is no seed of an nkey") from error

    def sign(self, nonce: str) -> bytes:
        """What nats-py has to send to a broker that asks with that nonce."""
        import nkeys

        return base64.b64encode(nkeys.from_seed(self.seed).sign(nonce.encode()))


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Who the process is, in one of the ways that NATS knows; nothing for a broker that does not ask."""

    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    token: str = dataclasses.field(default="", repr=False)
    nkey_file: str = ""
    """A file with the seed of an nkey."""
    creds_file: str = ""
    """A file with a user's JWT and seed, as nsc writes it."""

    def check(self) -> None:
        """Raises ValueError for several ways at once, a user without a password, and a file that is no good."""
        given = [bool(self.user), bool(self.token), bool(self.nkey_file), bool(self.creds_file)]
        if sum(given) > 1:
            raise ValueError("give only one of a NATS user, token, nkey file and credentials file")
        if self.user and not self.password:
            raise ValueError(f"the NATS user {self.user} has no password: set the variable TOKENBUS_NATS_PASSWORD")
        self.keys()

    def keys(self) -> Keys | None:
        """What is in the file now, None without one. Raises ValueError that names the file and shows nothing of it."""
        path = self.creds_file or self.nkey_file
        if not path:
            return None
        lines = _lines(path)
        seed = next((line for line in lines if line.startswith(_SEED_BEGINS)), "")
        keys = Keys(seed.encode(), _jwt_of(lines) if self.creds_file else "")
        try:
            assert keys.public
        except ValueError as error:
            raise ValueError(f"{path} holds no seed of a user's nkey: a line of SU and 56 more") from error
        if self.creds_file and not keys.jwt:
            raise ValueError(f"{path} holds no user's JWT: nsc writes it beside the seed; a seed alone is --nats-nkey")
        return keys


def is_world_readable(path: str) -> bool:
    """Whether a file of secrets is open to everybody on this machine."""
    return os.name == "posix" and os.path.exists(path) and bool(os.stat(path).st_mode & stat.S_IROTH)


def _lines(path: str) -> list[str]:
    try:
        return [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: the NATS credentials can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: NATS credentials are a text file, and this is none") from error


def _jwt_of(lines: list[str]) -> str:
    """The line below its heading, if it looks like one."""
    below = (line for heading, line in itertools.pairwise(lines) if _JWT_BEGINS in heading)
    return next((line for line in below if line.count(".") == 2), "")
