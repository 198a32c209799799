"""Events of a supervised engine, for the replica that it serves."""

from tokenbus.worker.contract import contract
from tokenbus.worker.contract.contract import RecoveredCopies
from tokenbus.worker.engine.process import ipc

Observation = (
    ipc.StepStats | ipc.KvPoolStats | ipc.ConstraintCompiled | ipc.BlocksRefused | ipc.MemoryPoisoned | RecoveredCopies
)


class EngineListener:
    """Receives an engine's events. Every method does nothing; subclasses override those that they need."""

    def loading(self, fraction: float) -> None:
        """The engine has loaded this much of its model, from 0 to 1."""

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """An engine serves; it continues the streams that the previous one left open."""

    def engine_died(self) -> None:
        """There is no engine. Called before any stream is told, and possibly more than once."""

    def observe(self, seen: Observation) -> None:
        """The engine reports what is only to be counted or logged."""

    def constraint_given_up(self) -> None:
        """A request ended because its constraint became too costly to follow."""

    def prompt_progress(self, key: str, computed_tokens: int, cached_tokens: int) -> None:
        """The engine has computed this much of a request's prompt, part of which was cached."""

    def token_interval(self, seconds: float, count: int) -> None:
        """`count` requests got a token, each `seconds` after its previous one."""

    def step_done(self) -> None:
        """Every sink has received the outputs of a step."""
