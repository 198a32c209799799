"""Models how long a device takes for a step."""

from typing import NamedTuple

from tokenbus.worker.engine.scheduling.plan import StepPlan


class Polynomial(NamedTuple):
    """`squared * x * x + linear * x + constant`, in milliseconds."""

    squared: float
    linear: float
    constant: float

    def __call__(self, x: float) -> float:
        return (self.squared * x + self.linear) * x + self.constant


class TimingModel(NamedTuple):
    """A step takes the time of its prompt tokens, if any, plus that of its decodes, if any."""

    prefill: Polynomial
    """A function of the prompt tokens in the step."""
    decode: Polynomial
    """A function of the share of the KV memory that the sequences in the step use, from 0 to 1."""
    per_decode_ms: float = 0.0
    """The time that each decode adds."""
    least_ms: float = 0.0
    """The minimum time of a step."""

    def step_ms(self, prompt_tokens: int, decodes: int, kv_usage: float) -> float:
        prefill_ms = self.prefill(prompt_tokens) if prompt_tokens else 0.0
        decode_ms = self.decode(kv_usage) + self.per_decode_ms * decodes if decodes else 0.0
        return max(self.least_ms, prefill_ms + decode_ms)


PRESETS = {
    "dynamo": TimingModel(
        prefill=Polynomial(4.209989e-07, 1.518344e-02, 1.650142e01),
        decode=Polynomial(-25.74, 54.01, 5.74),
    ),
    "cpu-0.5b-q8_0": TimingModel(
        prefill=Polynomial(0.0, 8.3, 0.0),
        decode=Polynomial(0.0, 20.0, 16.0),
        per_decode_ms=14.5,
    ),
    "steps-of-50ms": TimingModel(Polynomial(0.0, 0.0, 0.0), Polynomial(0.0, 0.0, 0.0), least_ms=50.0),
}
"""`dynamo` has the polynomials of NVIDIA Dynamo's simulated engine. `cpu-0.5b-q8_0` is a model of 0.5B parameters in
Q8_0 on 2 threads of an x86-64 server, as measured in bench/README.md. `steps-of-50ms` depends on nothing."""


def plan_ms(plan: StepPlan, timing: TimingModel, capacity_tokens: int) -> float:
    """Returns the milliseconds that a step takes on a device with `capacity_tokens` of KV memory."""
    prompt_tokens = decodes = used = 0
    for part in plan.scheduled:
        used += part.start + part.num_tokens
        if part.num_tokens > 1 or not part.samples:
            prompt_tokens += part.num_tokens
        else:
            decodes += 1
    return timing.step_ms(prompt_tokens, decodes, min(1.0, used / capacity_tokens))
