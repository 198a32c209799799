"""Messages arrive as they were sent, however the bytes between frontend and engine come in."""

import itertools
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arithmetic import make_config
from tokenbus.protocol.wire import block_hash, errors, internal, messages
from tokenbus.worker.contract import contract, engine_output, engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.files.device_memory import DeviceMemory

COMMANDS: list[ipc.Command] = [
    ipc.Add(
        7,
        b"\x01\0\0\0\x02\0\0\0",
        engine_request.Sampling(
            max_tokens=9, min_tokens=2, temperature=0.5, seed=2**32 - 1, stop_token_ids=(3, 4), ignore_eos=True
        ),
    ),
    ipc.Add(
        8,
        b"\x01\0\0\0",
        engine_request.Sampling(
            max_tokens=1,
            repetition_penalty=1.5,
            repetition_last_n=0,
            presence_penalty=-2.0,
            frequency_penalty=0.5,
            logit_bias=((3, -1.5), (2**31, 100.0)),
            logprobs=0,
        ),
        domain=("acme", "salt"),
        priority=-10,
        return_progress=True,
    ),
    ipc.Add(
        9,
        b"\x01\0\0\0\x02\0\0\0",
        engine_request.Sampling(max_tokens=9),
        num_sampled=1,
        constraint=engine_request.Constraint(
            kind=engine_request.ConstraintKind.LARK, source='start: "é\0"', param="grammar", preamble="start: @body"
        ),
        tenant="acme",
    ),
    ipc.Add(
        10,
        b"\x01\0\0\0",
        engine_request.Sampling(max_tokens=9),
        constraint=engine_request.Constraint(
            kind=engine_request.ConstraintKind.REGEX, source="a+", param="regex", preamble=""
        ),
    ),
    ipc.Add(11, b"\x01\0\0\0", engine_request.Sampling(max_tokens=9), adapters=(block_hash.Adapter("d", 0.5),)),
    ipc.LoadAdapter(5, "/adapters/é.gguf"),
    ipc.UnloadAdapter("d"),
    ipc.RetainSession("acme", "s", 60.0),
    ipc.ExpectTurn(8, engine_request.ExpectedTurn(b"\x01\0\0\0", 1, "acme", "", "s", (), 60.0)),
    ipc.Abort(2**40),
    ipc.ClearCache(),
    ipc.AbortPooling(3),
    ipc.ExportBlocks(5, contract.CachedPrefix("acme", "salt", (block_hash.Adapter("a1", 0.5),), b"\x01\0\0\0"), 3, 8),
    ipc.PutBlocks(contract.CachedPrefix("acme", "", (), b"\x01\0\0\0"), 0, [b"\0block", b""]),
    ipc.EmbedCall(3, internal.Embed(inputs=["x", [1, 2]], dimensions=4, remaining_ms=100.0)),
    ipc.RerankCall(4, internal.Rerank(query="q", documents=["a"], remaining_ms=5.0)),
    ipc.TokenizeCall(1, internal.Tokenize(text="a\0é")),
    ipc.TokenizeCall(
        2,
        internal.Tokenize(
            messages=[messages.ChatMessage(role="user", content="hi")], chat_template_kwargs={"a": [1, {"b": None}]}
        ),
    ),
    ipc.ReadMemory(),
]
REPORTS: list[ipc.Report] = [
    ipc.Loading(0.25),
    ipc.ConstraintStarted(3),
    ipc.LoadFailed("no such file"),
    ipc.Ready(make_config(), [b"", b"\xff", b"a"], None),
    ipc.Ready(make_config(features=()), [], b"\0bundle"),
    ipc.StepReport([1, 2], [], messages.Load(waiting=3)),
    ipc.StepReport(
        [],
        [ipc.SequenceOutput(1, [0, 3], None), ipc.SequenceOutput(2, [], EngineFinishReason.ABORTED)],
        messages.Load(running=1, step_age_ms=0.5),
    ),
    ipc.StepReport(
        [],
        [ipc.SequenceOutput(1, [5], None, [engine_output.Logprob(5, -0.25, [(5, -0.25), (6, -1.5)])], cached_tokens=0)],
        messages.Load(cached_blocks=2),
        progress=[ipc.PromptProgress(2, 48, 16)],
        removed=[2**64 - 1, 0],
        stored=[(0, 2**64 - 1), (2**64 - 1, 7)],
    ),
    ipc.StepIsolated(3),
    ipc.MemoryPoisoned([3, 5]),
    ipc.ConstraintCompiled(9, 0.25),
    ipc.ConstraintCompiled(9, 0.25, errors.make_error(errors.Code.INVALID_REQUEST, "regex: (", param="regex")),
    ipc.ExportedBlocks(5, 2, [b"\0block"]),
    ipc.BlocksRefused(2),
    ipc.MemoryRead([DeviceMemory("CUDA0", 1 << 36, 5)]),
    ipc.MemoryRead([]),
    ipc.PoolingBatch([3, 4]),
    ipc.PoolingBatch([]),
    ipc.PoolResult(3, b"\x00" * 8, 2, None),
    ipc.AdapterResult(5, "d", None),
    ipc.AdapterResult(5, "", errors.make_error(errors.Code.INVALID_REQUEST, "no such file", param="path")),
    ipc.TokenizeCallResult(1, b"\x05\0\0\0", None),
    ipc.TokenizeCallResult(2, b"", errors.make_error(errors.Code.UNSUPPORTED, "no template", param="messages")),
]
BODIES = [b"", b"a", b"bc" * 200, b"", b"\0\0\0\0\xff"]


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


STREAM = b"".join(map(framed, BODIES))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda frame: type(frame).__name__)
def test_a_command_comes_back_as_it_was(command: ipc.Command) -> None:
    (body,) = ipc.FrameDecoder().feed(ipc.encode(command))
    assert ipc.command_decoder.decode(body) == command


@pytest.mark.parametrize("report", REPORTS, ids=lambda frame: type(frame).__name__)
def test_a_report_comes_back_as_it_was(report: ipc.Report) -> None:
    (body,) = ipc.FrameDecoder().feed(ipc.encode(report))
    assert ipc.report_decoder.decode(body) == report


def test_every_kind_of_message_is_tried_here() -> None:
    about_process = {ipc.LoadBegan, ipc.ReplicaClosed, ipc.ExitReason}
    tried = {type(frame) for frame in (*COMMANDS, *REPORTS)} | {ipc.OpenReplica} | about_process
    assert tried == set(ipc.IpcMessage.__subclasses__())


def test_the_sockets_of_replicas_come_beside_their_messages_in_order() -> None:
    frontend, process = socket.socketpair()
    pairs = [socket.socketpair() for _ in range(3)]
    for number, (_, theirs) in enumerate(pairs):
        opened = ipc.OpenReplica(number, EngineSettings(model=f"model-{number}"))
        socket.send_fds(frontend, [ipc.encode(opened)], [theirs.fileno()])
    frontend.close()
    received = list(ipc.receive_with_sockets(process))
    assert [(opened.number, opened.settings.model) for opened, _, _ in received] == [
        (number, f"model-{number}") for number in range(3)
    ]
    for number, ((ours, theirs), (_, passed, _)) in enumerate(zip(pairs, received, strict=True)):
        ours.sendall(bytes([number]))
        assert passed.recv(1) == bytes([number])
        for one in (ours, theirs, passed):
            one.close()
    process.close()


@pytest.mark.parametrize("frame", [ipc.LoadBegan(7), ipc.ReplicaClosed(7), ipc.ExitReason("an assertion failed")])
def test_what_is_told_about_a_process_comes_back_as_it_was(
    frame: ipc.LoadBegan | ipc.ReplicaClosed | ipc.ExitReason,
) -> None:
    (body,) = ipc.FrameDecoder().feed(ipc.encode(frame))
    assert ipc.process_message_decoder.decode(body) == frame


@pytest.mark.parametrize("end", EngineFinishReason)
def test_every_finish_reason_arrives(end: EngineFinishReason) -> None:
    report = ipc.StepReport([], [ipc.SequenceOutput(1, [], end)], messages.Load())
    (body,) = ipc.FrameDecoder().feed(ipc.encode(report))
    assert ipc.report_decoder.decode(body) == report


def test_frames_fed_at_once_are_decoded_one_by_one() -> None:
    assert list(ipc.FrameDecoder().feed(STREAM)) == BODIES


def test_frames_fed_byte_by_byte_are_decoded() -> None:
    decoder = ipc.FrameDecoder()
    assert [body for byte in STREAM for body in decoder.feed(bytes([byte]))] == BODIES


@pytest.mark.parametrize("place", [*range(20), 200, 405, 406, 410, len(STREAM) - 1, len(STREAM)])
def test_frames_cut_in_two_are_decoded(place: int) -> None:
    decoder = ipc.FrameDecoder()
    assert [*decoder.feed(STREAM[:place]), *decoder.feed(STREAM[place:])] == BODIES


@pytest.mark.parametrize("length", range(1, 9))
def test_an_incomplete_frame_waits_for_its_rest(length: int) -> None:
    tail = framed(b"tail.")
    decoder = ipc.FrameDecoder()
    assert list(decoder.feed(STREAM + tail[:length])) == BODIES
    assert list(decoder.feed(b"")) == []
    assert list(decoder.feed(tail[length:] + framed(b"next"))) == [b"tail.", b"next"]


@given(bodies=st.lists(st.binary(max_size=30), max_size=8), places=st.lists(st.integers(0, 300), max_size=10))
@settings(max_examples=150)
def test_frames_cut_anywhere_are_decoded(bodies: list[bytes], places: list[int]) -> None:
    stream = b"".join(map(framed, bodies))
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    decoder = ipc.FrameDecoder()
    parts = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert [body for part in parts for body in decoder.feed(part)] == bodies


def test_the_longest_frame_is_awaited_and_one_byte_more_is_corrupt() -> None:
    decoder = ipc.FrameDecoder()
    assert list(decoder.feed(struct.pack("<I", ipc.MAX_FRAME_BYTES) + b"x")) == []
    with pytest.raises(ValueError, match=str(ipc.MAX_FRAME_BYTES + 1)):
        list(ipc.FrameDecoder().feed(struct.pack("<I", ipc.MAX_FRAME_BYTES + 1)))


def test_frames_before_a_corrupt_length_are_still_decoded() -> None:
    bodies = ipc.FrameDecoder().feed(framed(b"good") + b"\xff\xff\xff\xff")
    assert next(bodies) == b"good"
    with pytest.raises(ValueError, match="a frame of"):
        next(bodies)


def test_frames_are_received_until_the_other_end_closes_and_an_incomplete_one_is_dropped() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(STREAM + framed(b"cut short")[:-1])
        theirs.shutdown(socket.SHUT_WR)
        assert list(ipc.receive(ours)) == BODIES
