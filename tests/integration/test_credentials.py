"""Every kind of authentication against a real nats-server, with right and wrong credentials."""

import asyncio
import contextlib
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import auth_brokers
from tests.support.auth_brokers import GUARDS, ClientAuth, WrongAuth, guarded, secret_file, settings
from tests.support.system import command, environment
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.handshake import BrokerRefusedError
from tokenbus.protocol.wire import errors, messages

CONFIG = Path(__file__).parents[2] / "deploy" / "nats.conf"
GENERATE = ("generate", "--model", "demo", "hello")
MISTAKES = [
    ("token", "another token", GENERATE),
    ("nkey", "another key", ("router",)),
    ("creds", "of another account", ("worker", "--model", "demo")),
    ("tls", "another authority", ("router",)),
    ("mutual tls", "no certificate", ("gateway", "--port", "0")),
    ("mapped tls", "another user", ("router",)),
]
FURTHER_MISTAKES = [
    (auth_brokers.by_token, "nothing"),
    (auth_brokers.by_creds, "expired"),
    (auth_brokers.by_tls, "no authority"),
    (auth_brokers.by_tls_of_another_name, "right"),
    (auth_brokers.by_mutual_tls, "a stranger's certificate"),
    (auth_brokers.by_nothing, "TLS"),
]
SIM = ("--engine", "sim", "--sim-speedup", "20")


def end_of(way: ClientAuth, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments, *way.flags),
        env=environment() | way.variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check_says(ended: "subprocess.CompletedProcess[str]", line: str, url: str, mistake: WrongAuth) -> None:
    assert f"the NATS broker at {url} " in line
    assert mistake.said in line
    assert not any(secret in ended.stdout + ended.stderr for secret in mistake.way.secrets())


async def until_ready(client: WireClient) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(errors.RequestError):  # no router yet
                cards = (await client.models()).cards
                if any(card.state is messages.WorkerState.READY for card in cards):
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", GUARDS)
async def test_a_request_is_answered_where_the_broker_asks_who_one_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = GUARDS[kind](tmp_path)
    async with guarded(guard, tmp_path) as system:
        reached = settings(system.url, guard.right, monkeypatch)
        system.router("router", *guard.right.flags)
        system.worker("worker", *SIM, *guard.right.flags, model="dynamo")
        async with await WireClient.connect(settings=reached) as client:
            await until_ready(client)
            stream = client.generate("demo", prompt="hello", max_tokens=4)
            assert [chunk.finish_reason async for chunk in stream][-1] is messages.FinishReason.LENGTH
        for name in ("router", "worker"):
            assert not any(secret in system.text_log(name) for secret in guard.right.secrets())


@pytest.mark.parametrize(("kind", "mistake", "arguments"), MISTAKES)
async def test_a_process_that_the_broker_refuses_ends_with_status_1_and_one_line_that_says_what_to_do(
    kind: str, mistake: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    guard = GUARDS[kind](tmp_path)
    async with guarded(guard, tmp_path) as system:
        ended = end_of(guard.wrong[mistake].way, *arguments, "--nats", system.url)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    check_says(ended, line, system.url, guard.wrong[mistake])


async def test_the_doctor_says_what_to_do_about_a_broker_that_refuses(tmp_path: Path) -> None:
    guard = auth_brokers.by_token(tmp_path)
    mistake = guard.wrong["another token"]
    async with guarded(guard, tmp_path) as system:
        ended = end_of(mistake.way, "doctor", "--nats", system.url)
    assert (ended.returncode, ended.stderr) == (1, "\n1 to fix\n")
    check_says(ended, ended.stdout.splitlines()[-1], system.url, mistake)


@pytest.mark.parametrize(("make", "mistake"), FURTHER_MISTAKES)
async def test_a_refusal_is_told_at_once(
    make: auth_brokers.Make, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = make(tmp_path)
    way, said = guard.wrong[mistake]
    async with guarded(guard, tmp_path) as system, asyncio.timeout(60):
        with pytest.raises(BrokerRefusedError, match=said) as caught:
            await connection.connect(settings(system.url, way, monkeypatch), "test")
    assert not any(secret in str(caught.value) for secret in way.secrets())


@pytest.mark.parametrize("verify", ["false", "true"])
async def test_the_tls_of_the_configuration_that_comes_with_tokenbus_works_as_it_stands_there(
    verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = auth_brokers.CertificateAuthority(tmp_path, "ours")
    certificate, key = ours.issue("127.0.0.1")
    text = CONFIG.read_text().replace("# tls {", "tls {").replace("verify: false", f"verify: {verify}")
    for shown, file in (("server.pem", certificate), ("server-key.pem", key), ("ca.pem", ours.file)):
        assert f"/etc/nats/{shown}" in text
        text = text.replace(f"/etc/nats/{shown}", file)
    for user in re.findall(r"TOKENBUS_(\w+)_PASSWORD", text):
        monkeypatch.setenv(f"TOKENBUS_{user}_PASSWORD", f"the-{user}")
    monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", "the-ACME")
    shown_too = ours.client_flags("acme.example") if verify == "true" else ()
    way = ClientAuth((*ours.flags, *shown_too, "--nats-user", "acme", "--nats-inbox", "_INBOX_acme"))
    async with guarded(auth_brokers.AuthSetup(text, way, {}), tmp_path) as system:
        made = await connection.connect(settings(system.url, way, monkeypatch), "test")
        await made.flush()
        await made.close()


async def test_files_that_are_no_good_end_every_process_with_one_line_and_status_2(tmp_path: Path) -> None:
    empty = secret_file(tmp_path / "empty", "")
    ended = await asyncio.gather(
        asyncio.to_thread(end_of, ClientAuth(("--nats-creds", "/missing")), "router"),
        asyncio.to_thread(end_of, ClientAuth(("--nats-nkey", empty)), "worker", "--model", "demo"),
        asyncio.to_thread(end_of, ClientAuth(("--nats-ca", empty)), *GENERATE),
    )
    assert [one.returncode for one in ended] == [2, 2, 2]
    lines = [one.stderr.removeprefix("tokenbus: ") for one in ended]
    assert lines == [
        "/missing: the NATS credentials can't be read: No such file or directory\n",
        f"{empty} has no seed of a user's nkey: a line of SU and 56 more characters\n",
        f"{empty} has no certificate of an authority in PEM (NO_CERTIFICATE_OR_CRL_FOUND)\n",
    ]
