"""Attacks on our HTTP ports over raw sockets: attackers only use up each other's connections."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hostile.scale import times
from tests.support.raw_http import HALF_A_HEAD, LIVEZ, Socket, ask, cut_after, small_server
from tests.support.system import running_gateway
from tokenbus.cli.console import nats_server
from tokenbus.gateway.http import listen
from tokenbus.protocol.http.connection_table import ConnectionLimits
from tokenbus.protocol.http.http_server import Timeouts
from tokenbus.protocol.http.refusals import Reason

SOON = Timeouts(head_s=0.05, keep_alive_s=0.05, slow_reader_s=0.05, linger_s=0.05)
SLOW_HEADS = Timeouts(head_s=0.05, keep_alive_s=60)
OK = (200, b"ok\n")
KEPT = LIVEZ.replace(b"Connection: close\r\n", b"")
HOLD, READ = KEPT.replace(b"livez", b"hold"), KEPT.replace(b"GET /livez", b"POST /read")
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
"""Java's client sends these headers with its first request."""


def code_of(answer: tuple[int, bytes]) -> tuple[int, str]:
    """Returns status and code of an API error."""
    status, body = answer
    return status, json.loads(body)["error"]["code"]


async def flood(port: int, count: int, said: bytes = HALF_A_HEAD, source: str = "127.0.0.1") -> list[Socket]:
    listen.raise_open_file_limit()
    return [await Socket.open(port, said, source) for _ in range(count)]


async def test_sockets_with_half_a_head_close_the_gateway_to_nobody_nor_keep_it_from_leaving(tmp_path: Path) -> None:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    few = ["--max-requests", "16"] if times(1, 0) else []  # 96 connections
    try:
        arguments = ["--metrics-port", "0", "--grace-s", "60", *few]
        with cut_after([]) as sockets, running_gateway(nats.url, tmp_path, *arguments) as gateway:
            port = urlsplit(gateway.url).port or 0
            (page,) = gateway.log("status_page")
            sockets += await flood(port, times(200, 2_200))
            assert await ask(port) == OK
            assert await ask(port, source="127.0.0.2") == OK
            assert await ask(page["port"]) == OK
            _, text = await ask(page["port"], LIVEZ.replace(b"/livez", b"/metrics"))
        assert gateway.process.returncode == 0
        assert b'tokenbus_gateway_connections_closed_total{reason="evicted"}' in text
        assert b'tokenbus_gateway_connections{state="idle"}' in text
        assert [line["reason"] for line in gateway.log("connections_closed")] == ["evicted"]
    finally:
        nats.stop()


async def test_the_connections_of_one_address_take_no_room_from_another() -> None:
    async with small_server(ConnectionLimits(total=1_000, per_address=20)) as (small, port):
        with cut_after(await flood(port, 1, LIVEZ.replace(b"close", b"keep-alive"), source="127.0.0.2")) as others:
            assert await others[0].answer() == OK
            with cut_after(await flood(port, times(100, 2_200))):
                assert await ask(port) == OK
                assert len(small.config.open_connections) <= 21
                others[0].say(LIVEZ)
                assert await others[0].answer() == OK
        assert set(small.ended) == {Reason.EVICTED}


async def test_an_address_with_as_many_requests_as_it_may_have_connections_is_told_to_come_back() -> None:
    async with small_server(ConnectionLimits(total=1_000, per_address=5)) as (small, port):
        hold = LIVEZ.replace(b"livez", b"hold")
        with cut_after(await flood(port, 5, hold)):
            await small.until_asked(5)
            assert code_of(await ask(port)) == (429, "too_many_connections")
            assert await ask(port, source="127.0.0.2") == OK
        assert small.ended == [Reason.TOO_MANY_PER_ADDRESS]


async def test_where_every_connection_works_another_is_told_to_come_back_and_crowds_of_them_are_cut() -> None:
    async with small_server(ConnectionLimits(total=2)) as (small, port):
        with cut_after(await flood(port, 2, LIVEZ.replace(b"livez", b"hold"))):
            await small.until_asked(2)
            crowd = await flood(port, 100)
            with cut_after(crowd):
                ends = [await one.rest() for one in crowd]
        told = [end for end in ends if end]
        assert len(told) >= 64
        assert all(end.startswith(b"HTTP/1.1 503") and b'"code":"overloaded"' in end for end in told)
        assert small.ended == [Reason.TOO_MANY] * 100


async def test_a_head_that_does_not_come_in_time_is_answered_and_ended() -> None:
    async with small_server(timeouts=SLOW_HEADS) as (small, port):
        with cut_after(await flood(port, times(50, 500))) as sockets:
            for one in sockets:
                assert code_of(await one.answer()) == (408, "request_timeout")
                assert await one.rest() == b""
        assert set(small.ended) == {Reason.SLOW_HEAD}
        assert small.paths == []


async def test_who_connects_and_says_nothing_is_ended_without_a_word() -> None:
    async with small_server(timeouts=SLOW_HEADS) as (_, port):
        with cut_after(await flood(port, 1, b"")) as (one,):
            assert await one.rest() == b""


async def test_a_second_head_on_a_kept_connection_has_the_same_time() -> None:
    async with small_server(timeouts=SLOW_HEADS) as (small, port):
        with cut_after(await flood(port, 1, LIVEZ.replace(b"close", b"keep-alive"))) as (one,):
            assert await one.answer() == OK
            one.say(b"G")
            assert code_of(await one.answer()) == (408, "request_timeout")
            assert await one.rest() == b""
        assert small.ended == [Reason.SLOW_HEAD]


async def test_a_connection_that_is_kept_for_nothing_is_ended() -> None:
    async with small_server(timeouts=Timeouts(head_s=60, keep_alive_s=0.05)) as (small, port):
        with cut_after(await flood(port, 1, LIVEZ.replace(b"close", b"keep-alive"))) as (one,):
            assert await one.answer() == OK
            assert await one.rest() == b""
        assert small.ended == []


async def test_a_body_that_goes_on_after_its_answer_is_not_heard_for_long() -> None:
    async with small_server(timeouts=SLOW_HEADS) as (_, port):
        head = b"POST /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
        with cut_after(await flood(port, 1, head + b"x")) as (one,):
            assert await one.answer() == OK
            assert await one.rest() == b""


async def test_a_reader_who_takes_nothing_is_ended_and_its_request_with_it() -> None:
    async with small_server(timeouts=SOON) as (small, port):
        with cut_after([await Socket.open(port, LIVEZ.replace(b"livez", b"endless"), limit=1)]):
            await asyncio.wait_for(small.gone.wait(), 10)
        assert small.ended == [Reason.SLOW_READER]


HOST = b"Host: a\r\n"
POST = b"POST /read HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
MALFORMED = {
    "no http": (b"HELO mail.example.com\r\n\r\n", 400, "invalid_http"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "invalid_http"),
    "two lengths": (CHUNKED + b"Content-Length: 6\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    "two lengths, reversed": (
        POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
        "invalid_http",
    ),
    "lengths that differ": (POST + b"Content-Length: 6\r\nContent-Length: 7\r\n\r\n", 400, "invalid_http"),
    "a length below 0": (POST + b"Content-Length: -1\r\n\r\n", 400, "invalid_http"),
    "another coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "invalid_http"),
    "chunks of http 1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", 400, "invalid_http"),
    "a chunk without a length": (CHUNKED + b"\r\nx\r\n", 400, "invalid_http"),
    "chunks of a byte": (CHUNKED + b"\r\n" + b"1\r\nx\r\n" * 2_000, 400, "invalid_http"),
    "a host with a space": (b"GET /livez HTTP/1.1\r\nHost: a b\r\n\r\n", 400, "invalid_http"),
    "a bare CR": (POST + b"X: a\rContent-Length: 6\r\n\r\n", 400, "invalid_http"),
    "a bare CR before it": (b"\r" + POST + b"\r\n", 400, "invalid_http"),
    "a null byte in a header": (POST + b"X: a\0b\r\n\r\n", 400, "invalid_http"),
    "a null byte in a path": (b"GET /li\0vez HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_http"),
    "a folded line after none": (b"GET /livez HTTP/1.1\r\n Host: a\r\n\r\n", 400, "invalid_http"),
    "a signed length": (POST + b"Content-Length: +6\r\n\r\n", 400, "invalid_http"),
    "a signed chunk": (CHUNKED + b"\r\n+6\r\nabcdef\r\n", 400, "invalid_http"),
    "a chunk that is longer than it says": (CHUNKED + b"\r\n1\r\nabc\r\n0\r\n\r\n", 400, "invalid_http"),
    "no host": (b"GET /livez HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "two hosts": (b"GET /livez HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400, "invalid_http"),
    "a space before the colon": (POST + b"Content-Length : 6\r\n\r\n", 400, "invalid_http"),
    "another version": (b"GET /livez HTTP/2.0\r\n" + HOST + b"\r\n", 505, "invalid_http"),
    "a long header": (POST + b"X: " + b"x" * 200_000 + b"\r\n\r\n", 431, "headers_too_large"),
    "many headers": (POST + b"X:\r\n" * 50_000 + b"\r\n", 431, "headers_too_large"),
    "more headers than may be": (POST + b"X:\r\n" * 100 + b"\r\n", 431, "headers_too_large"),
    "a tunnel": (b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n", 501, "invalid_http"),
    "an echo": (b"TRACE /livez HTTP/1.1\r\n" + HOST + b"\r\n", 501, "invalid_http"),
    "a method that nobody knows": (b"BREW /livez HTTP/1.1\r\n" + HOST + b"\r\n", 501, "invalid_http"),
    "a line without an end": (b"GET /" + b"x" * 20_000, 431, "headers_too_large"),
}


async def test_what_is_no_request_is_an_error_of_the_api_and_the_end_of_its_connection() -> None:
    async with small_server(timeouts=SOON) as (small, port):
        for name, (said, status, code) in MALFORMED.items():
            with cut_after([await Socket.open(port, said + LIVEZ)]) as (one,):
                assert code_of(await one.answer()) == (status, code), name
                assert await one.rest() == b"", name
        assert small.ended == [Reason.MALFORMED] * len(MALFORMED)
        assert small.bodies == []
        assert "/livez" not in small.paths, "what follows a bad request is no request"


REASONS = {
    b"GET /livez HTTP/1.1\r\n\r\n": "Missing mandatory Host: header",
    b"GET /livez HTTP/1.1\r\n" + HOST + HOST + b"\r\n": "Found multiple Host: headers",
    POST + b"Transfer-Encoding: gzip\r\n\r\n": "Only Transfer-Encoding: chunked is supported",
    b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n": "the method must be one of GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
    POST + b"secret \r\n\r\n": "illegal header line",
    b"secret: secret\r\n\r\n": "illegal request line",
    CHUNKED + b"\r\nsecret\r\n": "illegal chunk header",
    CHUNKED + b"\r\n1\r\nxsecret": "malformed chunk footer",
}


@pytest.mark.parametrize(("said", "reason"), REASONS.items(), ids=REASONS.values())
async def test_the_whole_reason_of_a_refusal_is_told_without_what_was_sent(said: bytes, reason: str) -> None:
    async with small_server() as (_, port):
        _, body = await ask(port, said)
    assert json.loads(body)["error"]["message"] == f"this is not a valid HTTP request: {reason}"


BAD_HEADS = {
    "a bad header": b" HTTP/1.1\r\nbad\r\n\r\n",
    "another version": b" HTTP/1.2\r\nHost: a\r\n\r\n",
    "a long head": b" HTTP/1.1\r\nX: " + b"x" * 20_000,
    "a long query": b"?" + b"x" * 20_000,
    "a bad chunk": b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    "the start of a head": b" HTTP/1.1\r\nHo",
}
FORMS = {
    "/v1/messages": {"type", "error", "request_id"},
    "/v1/messages/count_tokens": {"type", "error", "request_id"},
    "http://a/v1/messages": {"type", "error", "request_id"},
    "/v1/chat/completions": {"message", "type", "param", "code"},
    "/read?/v1/messages": {"message", "type", "param", "code"},
    "/api/show": {"error"},
}


@pytest.mark.parametrize("bad", BAD_HEADS.values(), ids=BAD_HEADS)
@pytest.mark.parametrize("path", FORMS)
async def test_what_is_no_request_is_refused_in_the_form_of_its_path(path: str, bad: bytes) -> None:
    async with small_server(timeouts=SOON) as (_, port):
        status, body = await ask(port, b"POST " + path.encode() + bad)
    assert 400 <= status < 600
    found = json.loads(body)
    if "type" in FORMS[path] and "code" in FORMS[path]:
        found = found["error"]
    assert found.keys() == FORMS[path]


async def test_the_path_of_a_request_says_nothing_about_the_next_one() -> None:
    async with small_server() as (_, port):
        kept = KEPT.replace(b"/livez", b"/v1/messages")
        with cut_after([await Socket.open(port, kept)]) as (one,):
            assert await one.answer() == OK
            one.say(b"bad\r\n\r\n")
            assert code_of(await one.answer()) == (400, "invalid_http")


UNUSUAL = {
    "a whole URL": POST.replace(b"/read", b"http://a:80/read") + b"Content-Length: 3\r\n\r\nabc",
    "a whole URL in capitals": POST.replace(b"/read", b"HTTP://A/read") + b"Content-Length: 3\r\n\r\nabc",
    "an empty line before it": b"\r\n" + POST + b"Content-Length: 3\r\n\r\nabc",
    "two bare line feeds before it": b"\n\n" + POST + b"Content-Length: 3\r\n\r\nabc",
    "a folded header": POST + b"X: a\r\n  b\r\nContent-Length: 3\r\n\r\nabc",
    "the same length twice": POST + b"Content-Length: 3\r\n" * 2 + b"\r\nabc",
    "extensions of chunks": CHUNKED + b'\r\n1;a=b\r\na\r\n2;a="b;c"\r\nbc\r\n0;d\r\n\r\n',
    "trailers": CHUNKED + b"\r\n3\r\nabc\r\n0\r\nContent-Length: 5\r\nX: y\r\n\r\n",
}


@pytest.mark.parametrize("said", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("cut", [0, 1], ids=["in one piece", "byte by byte"])
async def test_unusual_requests_that_the_rfc_allows_are_served_and_the_next_one_too(said: bytes, cut: int) -> None:
    async with small_server() as (small, port):
        with cut_after([await Socket.open(port)]) as (one,):
            for number in range(0, len(said), cut or len(said)):
                one.say(said[number : number + (cut or len(said))])
                await asyncio.sleep(0)
            assert await one.answer() == OK
            one.say(b"\r\n" + LIVEZ)
            assert await one.answer() == OK
            assert await one.rest() == b""
        assert small.paths == ["/read", "/livez"]
        assert small.bodies == [b"abc"]


async def test_an_empty_line_between_requests_in_a_row_is_skipped() -> None:
    async with small_server() as (small, port):
        with cut_after([await Socket.open(port, (KEPT + b"\r\n") * 3 + b"\r\n" + LIVEZ)]) as (one,):
            assert [await one.answer() for _ in range(4)] == [OK] * 4
        assert small.ended == []


async def test_a_whole_url_without_a_path_means_the_root() -> None:
    async with small_server() as (small, port):
        assert await ask(port, b"GET http://a?b HTTP/1.1\r\n" + HOST + b"\r\n") == OK
        assert small.paths == ["/"]


async def test_what_follows_the_last_request_of_a_connection_does_not_disturb_it() -> None:
    async with small_server() as (small, port):
        with cut_after([await Socket.open(port, LIVEZ.replace(b"livez", b"wait"))]) as (one,):
            await small.until_asked(1)
            one.say(b"\r\n" + LIVEZ)
            assert await ask(port) == OK  # by then these bytes have been read
            small.may_answer.set()
            assert await one.answer() == OK
            assert await one.rest() == b""
        assert small.paths == ["/wait", "/livez"]


async def test_requests_that_are_sent_in_a_row_are_answered_in_a_row() -> None:
    count = times(100, 1_000)
    async with small_server() as (small, port):
        kept = LIVEZ.replace(b"close", b"keep-alive")
        with cut_after([await Socket.open(port, kept * count)]) as (one,):
            assert [await one.answer() for _ in range(count)] == [OK] * count
        assert len(small.paths) == count


@pytest.mark.parametrize("next_bytes", [b"\r\n", LIVEZ], ids=["an empty line", "a request"])
@pytest.mark.parametrize("header", [b"", UPGRADE], ids=["", "that asks for HTTP/2"])
async def test_a_client_that_disconnects_is_noticed_though_it_has_sent_more(next_bytes: bytes, header: bytes) -> None:
    async with small_server() as (small, port):
        with cut_after([await Socket.open(port, HOLD.replace(b"\r\n", b"\r\n" + header, 1))]) as (one,):
            await small.until_asked(1)
            one.say(next_bytes)
        async with asyncio.timeout(10):
            await small.gone.wait()
        assert small.paths == ["/hold"]


async def test_requests_that_wait_for_another_are_read_no_further_than_a_head_goes() -> None:
    async with small_server() as (small, port):
        with cut_after([await Socket.open(port, KEPT.replace(b"livez", b"wait"))]) as (one,):
            await small.until_asked(1)
            one.say(LIVEZ * 600_000)
            for _ in range(100):  # each takes the server longer than a read of 256 KiB
                assert await ask(port) == OK
            assert one.num_unsent_bytes > 0
        small.may_answer.set()


async def test_a_request_that_is_answered_before_it_may_send_its_body_is_the_last_of_its_connection() -> None:
    expecting = b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    async with small_server() as (small, port):
        # Were the connection kept, these bytes could be read as a body or as a request.
        with cut_after([await Socket.open(port, KEPT.removesuffix(b"\r\n") + expecting)]) as (one,):
            assert await one.answer() == OK
            assert await one.rest() == b""
        with cut_after([await Socket.open(port, READ.removesuffix(b"\r\n") + expecting)]) as (one,):
            assert await one.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            one.say(b"abc" + KEPT)
            assert [await one.answer(), await one.answer()] == [OK, OK]
        assert small.bodies == [b"abc"]


async def test_a_client_of_http_1_0_is_answered_and_its_connection_ended() -> None:
    async with small_server() as (_, port):
        with cut_after([await Socket.open(port, b"GET /livez HTTP/1.0\r\n\r\n")]) as (one,):
            assert await one.answer() == OK
            assert await one.rest() == b""


async def test_a_head_may_come_byte_by_byte() -> None:
    async with small_server() as (_, port):
        with cut_after([await Socket.open(port)]) as (one,):
            for number in range(len(LIVEZ)):
                one.say(LIVEZ[number : number + 1])
                await asyncio.sleep(0)
            assert await one.answer() == OK
