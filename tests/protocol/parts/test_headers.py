"""The headers of large messages are numbers of bytes and nothing else."""

import pytest

from tokenbus.protocol.parts import headers
from tokenbus.protocol.wire import errors


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", "0x10", " 1", "１", "1" * 13, "Infinity"])
def test_what_is_no_number_of_bytes_is_refused_with_the_name_of_the_header(text: str) -> None:
    for name, read in ((headers.SIZE, headers.size_of), (headers.OFFSET, headers.offset_of)):
        with pytest.raises(errors.RequestError) as refused:
            read({name: text})
        assert refused.value.error.param == name


def test_the_headers_are_read() -> None:
    assert headers.size_of({"Tokenbus-Size": "8000000"}) == 8_000_000
    assert headers.offset_of({"Tokenbus-Offset": "0"}) == 0
    assert headers.is_announcement({"Tokenbus-Size": "x"})
    assert not headers.is_announcement({"Content-Type": "application/json"})
    assert not headers.is_announcement(None)


@pytest.mark.parametrize(("max_payload", "size"), [(1_048_576, 262_144), (65_536, 61_440), (4_097, 1), (100, 1)])
def test_a_part_leaves_room_in_a_message_and_time_for_others(max_payload: int, size: int) -> None:
    assert headers.part_bytes(max_payload) == size
