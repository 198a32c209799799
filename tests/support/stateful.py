"""A runner whose lanes have a state that can't be cut at a token: it can be copied as it is, and lost with the lane."""

from array import array
from collections.abc import Sequence as Listing

from tests.support.arithmetic import ArithmeticRunner, Cell
from tokenbus.worker.contract import contract
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, RestoreState, SaveState, Truncate, Wipe
from tokenbus.worker.engine.scheduling.plan import Outcome, StepPlan

STATE_BYTES, TOKEN_BYTES = 100, 3


class StatefulRunner(ArithmeticRunner):
    """The state of a lane is the list of all tokens that it has computed. With `has_kv` false, it has nothing besides.

    Fails wherever an op or a step assumes another state than the lane has."""

    def __init__(self, config: contract.EngineConfig, num_lanes: int, *, has_kv: bool = True) -> None:
        super().__init__(config, num_lanes=num_lanes)
        self._has_kv = has_kv
        self._states: list[list[int]] = [[] for _ in range(num_lanes)]
        self._kv: dict[int, dict[int, int]] = {}
        self._saved: dict[int, list[int]] = {}

    @property
    def copied_bytes(self) -> int:
        return STATE_BYTES * len(self._saved) + TOKEN_BYTES * sum(map(len, self._kv.values()))

    def is_empty(self) -> bool:
        return not (any(self._lanes) or any(self._states) or self._kv or self._saved)

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        for op in kv_ops:
            match op:
                case Truncate(lane, 0, None):
                    self._lanes[lane], self._states[lane] = {}, []
                case Offload(number, lane, start, end) if self._has_kv:
                    held = self._lanes[lane]
                    assert number not in self._kv
                    assert end == len(self._states[lane]), "a copy of a lane that has gone on"
                    self._kv[number] = {place: held[place].token_id for place in range(start, end)}
                case Onload(number, lane, start, end) if self._has_kv:
                    assert set(self._kv[number]) == set(range(start, end))
                    assert start == len(self._lanes[lane]), "a gap or an overlap"
                    self._lanes[lane] |= {place: Cell(one) for place, one in self._kv[number].items()}
                case SaveState(number, lane):
                    assert number not in self._saved
                    self._saved[number] = self._states[lane].copy()
                case RestoreState(number, lane):
                    assert not self._states[lane], "a lane with a state of its own"
                    state = self._states[lane] = self._saved[number].copy()
                    if not self._has_kv:
                        self._lanes[lane] = {place: Cell(one) for place, one in enumerate(state)}
                    assert len(self._lanes[lane]) == len(state), "a state of another position"
                case Discard(number):
                    assert (self._kv.pop(number, None) is None) != (self._saved.pop(number, None) is None)
                case Wipe():
                    pass
                case _:
                    raise AssertionError(f"can't be done with such a lane: {op}")
        self.check_room()

    def step(self, plan: StepPlan) -> list[Outcome]:
        for part in plan.scheduled:
            state = self._states[part.lane]
            assert array("I", state) == part.sequence.token_ids[: part.start], "a state of other tokens"
            state.extend(part.token_ids)
        return super().step(plan)
