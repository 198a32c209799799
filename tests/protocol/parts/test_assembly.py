"""Large messages are put together from their parts, whatever comes, and nobody takes more than a share."""

import hypothesis
import pytest
from hypothesis import strategies as st

from tokenbus.protocol.parts.assembly import UploadLimits, Uploads
from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.errors import Code

BOUNDS = UploadLimits(message_bytes=100, owner_bytes=150, total_bytes=200)
BODY = bytes(range(100))


class Checked(Uploads[str]):
    """Uploads that check themselves after each step."""

    def announce(self, subject: str, owner: str, size: int, context: str, now: float) -> None:
        try:
            super().announce(subject, owner, size, context, now)
        finally:
            self.check_integrity()

    def add(self, subject: str, offset: int, part: bytes, now: float):  # type: ignore[no-untyped-def]
        try:
            return super().add(subject, offset, part, now)
        finally:
            self.check_integrity()


def uploads(**changes: int) -> Checked:
    return Checked(BOUNDS._replace(**changes))


def refusal(known: Checked, subject: str, offset: int, part: bytes) -> Code:
    with pytest.raises(errors.RequestError) as refused:
        known.add(subject, offset, part, 0.0)
    return refused.value.error.code


def announce_refused(known: Checked, owner: str, size: int) -> Code:
    with pytest.raises(errors.RequestError) as refused:
        known.announce("more", owner, size, "", 0.0)
    return refused.value.error.code


@hypothesis.given(st.lists(st.integers(1, 99), unique=True).map(sorted), st.data())
def test_a_message_cut_anywhere_is_put_together_though_parts_come_again(cuts: list[int], data: st.DataObject) -> None:
    known = uploads()
    known.announce("a", "acme", 100, "context", 0.0)
    edges = [0, *cuts, 100]
    for begin, end in zip(edges, edges[1:], strict=False):
        upload = known.add("a", begin, BODY[begin:end], 0.0)
        if end < 100 and data.draw(st.booleans()):
            assert known.add("a", begin, BODY[begin:end], 0.0) is upload
        assert upload.is_complete == (end == 100)
    assert (bytes(upload.data), upload.context, upload.owner) == (BODY, "context", "acme")
    assert (len(known), known.held_bytes) == (0, 0)
    assert known.add("a", edges[-2], BODY[edges[-2] :], 9.9) is None, "the last part may come again"
    known.announce("b", "acme", 100, "", 0.0)


PARTS = st.tuples(
    st.sampled_from("abc"), st.integers(0, 60), st.integers(1, 60), st.sampled_from(["announce", "add", "remove"])
)


@hypothesis.given(st.lists(PARTS, max_size=40))
def test_whatever_comes_a_message_is_complete_only_as_it_was_sent(steps: list[tuple[str, int, int, str]]) -> None:
    known = uploads(owner_bytes=120, total_bytes=100)
    for name, offset, size, step in steps:
        try:
            if step == "announce" and name not in {one for one in "abc" if one in known._uploads}:
                known.announce(name, name, 60, name, 0.0)
            elif step == "add":
                upload = known.add(name, offset, BODY[offset : offset + size], 0.0)
                assert upload is None or bytes(upload.data) == BODY[: len(upload.data)]
            elif step == "remove":
                known.remove(name)
        except errors.RequestError as error:
            assert error.error.code in (Code.UPLOAD_LOST, Code.INVALID_REQUEST, Code.OVERLOADED)
        known.check_integrity()


def test_a_part_of_an_unknown_message_is_lost() -> None:
    assert refusal(uploads(), "a", 0, b"x") is Code.UPLOAD_LOST


@pytest.mark.parametrize(
    ("offset", "size", "code"),
    [
        (11, 10, Code.UPLOAD_LOST),  # a part before it is missing
        (9, 10, Code.INVALID_REQUEST),  # it overlaps
        (0, 11, Code.INVALID_REQUEST),
        (10, 91, Code.INVALID_REQUEST),  # it exceeds the size
    ],
)
def test_a_part_that_does_not_follow_ends_the_upload(offset: int, size: int, code: Code) -> None:
    known = uploads()
    known.announce("a", "acme", 100, "", 0.0)
    known.add("a", 0, BODY[:10], 0.0)
    assert refusal(known, "a", offset, bytes(size)) is code
    assert (len(known), known.held_bytes) == (0, 0)
    assert refusal(known, "a", 10, b"x") is Code.UPLOAD_LOST


def test_a_message_may_be_as_large_as_the_limit_and_no_larger() -> None:
    known = uploads()
    assert announce_refused(known, "acme", 101) is Code.PAYLOAD_TOO_LARGE
    assert announce_refused(known, "acme", 0) is Code.INVALID_REQUEST
    known.announce("a", "acme", 100, "", 0.0)


def test_an_owner_has_a_share_of_announced_bytes_and_others_have_theirs() -> None:
    known = uploads()
    known.announce("a", "acme", 100, "", 0.0)
    known.announce("b", "acme", 50, "", 0.0)
    assert announce_refused(known, "acme", 1) is Code.OVERLOADED
    known.announce("c", "globex", 100, "", 0.0)
    known.remove("b")
    known.announce("d", "acme", 50, "", 0.0)


def test_an_owner_may_announce_so_many_messages_however_small() -> None:
    known = uploads()
    for number in range(limits.MAX_TENANT_UPLOADS):
        known.announce(f"a{number}", "acme", 1, "", 0.0)
    assert announce_refused(known, "acme", 1) is Code.OVERLOADED
    known.announce("b", "globex", 1, "", 0.0)


def test_only_bytes_that_have_come_take_memory_from_other_owners() -> None:
    known = uploads(total_bytes=100)
    for owner in ("acme", "globex", "initech"):
        known.announce(owner, owner, 100, "", 0.0)
    known.add("acme", 0, BODY[:60], 0.0)
    known.add("globex", 0, BODY[:40], 0.0)
    assert refusal(known, "initech", 0, b"x") is Code.OVERLOADED
    known.remove("acme")
    known.add("globex", 40, BODY[40:99], 0.0)


def test_a_message_of_which_nothing_comes_expires_and_so_does_one_that_takes_too_long() -> None:
    known = uploads()
    known.announce("idle", "acme", 50, "", 0.0)
    known.announce("slow", "acme", 100, "", 0.0)
    known.add("idle", 0, b"x", 3.0)
    idle_until = 3.0 + limits.UPLOAD_IDLE_S
    known.add("slow", 0, BODY[:1], idle_until - 1.0)
    known.add("idle", 0, b"x", idle_until - 1.0)  # no news
    assert known.expire(idle_until - 0.01) == []
    assert [one.subject for one in known.expire(idle_until)] == ["idle"]
    for at in range(1, 90):
        known.add("slow", at, BODY[at : at + 1], idle_until + at)
    known.add("slow", 90, BODY[90:91], limits.UPLOAD_TTL_S - 1.0)
    assert known.expire(limits.UPLOAD_TTL_S - 0.01) == []
    assert [one.subject for one in known.expire(limits.UPLOAD_TTL_S)] == ["slow"]
    known.check_integrity()
