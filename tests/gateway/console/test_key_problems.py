"""A console's act on keys that fails says what is known of the key, and whether another try is safe."""

import pytest

from tokenbus.gateway.console import acts
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.protocol.access.key_stores import KeyInDoubtError, KeyStoreError


@pytest.mark.parametrize(
    ("error", "words", "is_retryable"),
    [
        (KeyInDoubtError("k1", "no answer"), "not known whether the key k1 was made", False),
        (KeyStoreError("the bucket is offline"), "the bucket is offline", True),
    ],
)
def test_a_key_that_may_have_been_made_is_named_and_not_made_again(
    error: KeyStoreError, words: str, is_retryable: bool
) -> None:
    with pytest.raises(ApiError) as told, acts._explained():
        raise error
    assert words in told.value.response.message
    assert told.value.response.retryable is is_retryable
