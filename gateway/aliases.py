"""Other names for models, each for one model or, by weights, for several, and the name meant by none; pure."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tokenbus.gateway.openai import schemas
from tokenbus.protocol.wire import subjects


class Target(NamedTuple):
    """A model behind an alias, and its share of the alias's requests."""

    model: str
    weight: float


class Aliases:
    """The aliases of a gateway."""

    def __init__(self, settings: Iterable[str] = (), default: str = "") -> None:
        """`settings` are `alias=model` or `alias=model:weight,other:weight`; `default` is a model or an alias. Raises
        ValueError for anything else."""
        self._targets: Mapping[str, list[Target]] = dict(_parse(one) for one in settings)
        if default:
            _check_name(default, f"default model {default!r}")
        self.default = default
        """The name that is meant by requests which name no model; empty if they are refused."""

    def __repr__(self) -> str:
        return f"<Aliases {sorted(self._targets)}>"

    def resolve(self, name: str, key: str) -> str:
        """Returns the model behind a name, which is the name itself if it is no alias.

        The same key, such as a conversation's session, always finds the same model."""
        targets = self._targets.get(name)
        if targets is None:
            return name
        digest = hashlib.blake2b(key.encode(), digest_size=8, key=name.encode()[:64]).digest()
        at = int.from_bytes(digest) / 2**64 * sum(target.weight for target in targets)
        for target in targets:
            at -= target.weight
            if at < 0:
                return target.model
        return targets[-1].model

    def listed(self, models: Sequence[schemas.Model]) -> list[schemas.Model]:
        """Returns the models, and behind them each alias of which all models with a share are served.

        Its context is the shortest of theirs."""
        served = {model.id: model for model in models}
        found = list(models)
        for alias, targets in self._targets.items():
            behind = [served.get(target.model) for target in targets if target.weight]
            if alias not in served and None not in behind:
                shortest = min((one for one in behind if one), key=lambda model: model.context_length)
                found.append(msgspec.structs.replace(shortest, id=alias))
        return found


def _parse(setting: str) -> tuple[str, list[Target]]:
    alias, _, models = setting.strip().partition("=")
    targets = [_target(one.strip(), setting) for one in models.split(",")]
    for name in (alias, *(target.model for target in targets)):
        _check_name(name, f"alias {setting!r}")
    if not any(target.weight for target in targets):
        raise ValueError(f"alias {setting!r}: at least one weight must be above 0")
    return alias, targets


def _check_name(name: str, setting: str) -> None:
    try:
        subjects.encode_name(name)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def _target(text: str, setting: str) -> Target:
    # A model's name may have colons itself (`org/model:Q4`): only a number behind the last one is a weight.
    model, colon, weight = text.rpartition(":")
    try:
        share = float(weight) if colon else 1.0
    except ValueError:
        return Target(text, 1.0)
    if not 0 <= share <= 1e6:
        raise ValueError(f"alias {setting!r}: weights must be 0 to 1000000, got {weight}")
    return Target(model if colon else text, share)
