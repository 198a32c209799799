"""The names, files and tenants of LoRA adapters, as settings and operators write them."""

from typing import NamedTuple

from tokenbus.protocol.wire import subjects


class AdapterSettings(NamedTuple):
    """An adapter for a replica to load."""

    name: str
    path: str
    tenants: tuple[str, ...] | None = None
    """The tenants that may use it; None for all."""

    def __str__(self) -> str:
        tenants = "" if self.tenants is None else f"@{','.join(self.tenants)}"
        return f"{self.name}={self.path}{tenants}"

    def check(self) -> None:
        """Raises ValueError for a name that can't be requested."""
        subjects.encode_name(self.name)
        if ":" in self.name:
            raise ValueError(f"an adapter's name must have no colon, got {self.name!r}")
        for tenant in self.tenants or ():
            subjects.encode_name(tenant)
        if not self.path or "\0" in self.path or self.tenants == ():
            raise ValueError("must be NAME=PATH or NAME=PATH@TENANT,...")


def parse(text: str) -> AdapterSettings:
    """Parses `NAME=PATH[@TENANT,...]`. Raises ValueError."""
    name, _, rest = text.partition("=")
    path, tenants = split_tenants(rest)
    settings = AdapterSettings(name, path, tenants)
    settings.check()
    return settings


def split_tenants(text: str) -> tuple[str, tuple[str, ...] | None]:
    """Splits `PATH[@TENANT,...]`: what follows the last @ are tenants, unless there is a slash in it."""
    path, at, tenants = text.rpartition("@")
    if not at or "/" in tenants:
        return text, None
    return path, tuple(tenant.strip() for tenant in tenants.split(","))
