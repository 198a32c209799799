"""The error with which something is refused."""

from collections.abc import Callable

import pytest

from tokenbus.protocol.wire import errors


def refusal_of(call: Callable[[], object]) -> errors.Error:
    """Returns the error of the RequestError that the call raises."""
    with pytest.raises(errors.RequestError) as raised:
        call()
    return raised.value.error
