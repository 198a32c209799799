"""Whether a model can do what a request needs is decided before its prompt is tokenized."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.builders import card, flight
from tokenbus.protocol.wire import errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.tokenization.prompt_tokenizer import PromptTokenizer

ANY: Any = None
UNLOADED = {"features": ["explain"], "state": messages.WorkerState.DRAINING, "loadable": True}


@pytest.mark.parametrize(
    ("changes", "code"),
    [(UNLOADED, errors.Code.NO_WORKER), ({"features": ["embed"]}, errors.Code.UNSUPPORTED)],
)
def test_only_of_a_model_that_is_loaded_it_is_said_that_it_generates_nothing(
    changes: dict[str, object], code: errors.Code
) -> None:
    fleet = Fleet(began_at=0.0)
    fleet.apply_card(card(**changes), time.monotonic())
    telemetry: Any = SimpleNamespace(model_found=lambda flight: None)
    with pytest.raises(errors.RequestError) as refused:
        PromptTokenizer(fleet, ANY, ANY, ANY, telemetry, ANY).check(flight())
    assert refused.value.error.code is code
