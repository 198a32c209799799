"""Events of a supervised engine, for the replica that it serves."""

from tokenbus.worker.contract import contract
from tokenbus.worker.engine.host_cache.recovery import RecoveredCopies
from tokenbus.worker.engine.process import ipc


class EngineListener:
    """Receives an engine's events. Every method does nothing; subclasses override those that they need."""

    def loading(self, fraction: float) -> None:
        """The engine has loaded this much of its model, from 0 to 1."""

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """An engine serves; it continues the streams that the previous one left open."""

    def copies_recovered(self, recovery: RecoveredCopies) -> None:
        """The engine found these copies of blocks when it started."""

    def memory_poisoned(self) -> None:
        """Non-finite numbers remain in the engine's memory, and it is about to end."""

    def engine_died(self) -> None:
        """There is no engine. Called before any stream is told, and possibly more than once."""

    def step_computed(self, stats: ipc.StepStats) -> None:
        """A step computed something."""

    def kv_pool_changed(self, stats: ipc.KvPoolStats) -> None:
        """The engine now has this part of a KV pool."""

    def constraint_compiled(self, compiled: ipc.ConstraintCompiled) -> None:
        """A constraint was compiled, or could not be."""

    def constraint_given_up(self) -> None:
        """A request ended because its constraint became too costly to follow."""

    def blocks_refused(self, count: int) -> None:
        """This many fetched blocks were not cached, because one of them can't be used."""

    def prompt_progress(self, key: str, computed_tokens: int, cached_tokens: int) -> None:
        """The engine has computed this much of a request's prompt, part of which was cached."""

    def token_interval(self, seconds: float, count: int) -> None:
        """`count` requests got a token, each `seconds` after its previous one."""

    def step_done(self) -> None:
        """Every sink has received the outputs of a step."""
