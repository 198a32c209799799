"""The headers of large messages are numbers of bytes and nothing else."""

import pytest

from tokenbus.protocol.parts import assembly
from tokenbus.protocol.wire import errors


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", "0x10", " 1", "１", "1" * 13, "Infinity"])
def test_what_is_no_number_of_bytes_is_refused_with_the_name_of_the_header(text: str) -> None:
    for name, read in ((assembly.SIZE, assembly.size_of), (assembly.OFFSET, assembly.offset_of)):
        with pytest.raises(errors.RequestError) as refused:
            read({name: text})
        assert refused.value.error.param == name


def test_the_headers_are_read() -> None:
    assert assembly.size_of({"Tokenbus-Size": "8000000"}) == 8_000_000
    assert assembly.offset_of({"Tokenbus-Offset": "0"}) == 0
    assert assembly.is_announcement({"Tokenbus-Size": "x"})
    assert not assembly.is_announcement({"Content-Type": "application/json"})
    assert not assembly.is_announcement(None)


@pytest.mark.parametrize(("max_payload", "size"), [(1_048_576, 262_144), (65_536, 61_440), (4_097, 1), (100, 1)])
def test_a_part_leaves_room_in_a_message_and_time_for_others(max_payload: int, size: int) -> None:
    assert assembly.part_bytes(max_payload) == size
