"""Rates and tables of `tokenbus top`."""

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest
from rich.console import Console

from tests.router.builders import card, fleet_of
from tests.router.fleet.test_digests import Sender
from tokenbus.cli.commands import top
from tokenbus.cli.commands.models import adapters_of, health_text
from tokenbus.cli.commands.top import Row, make_table
from tokenbus.cli.console.amounts import duration_text
from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, messages


def rows() -> list[Row]:
    name = "qwen2.5-0.5b-instruct"
    return [
        Row(
            f"worker-{number}",
            name,
            "ready",
            "decode",
            3,
            16,
            2,
            1_200,
            35.2,
            120,
            400,
            1_024,
            150,
            700,
            90,
            12.5,
            21.0,
            0.35,
            500,
            "live",
            number,
        )
        for number in range(3)
    ]


def shown(width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(make_table(rows(), (), width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_narrow_terminal_shows_the_columns_that_matter_most_and_all_of_them() -> None:
    head, first, *_ = shown(48)
    assert head.split() == ["worker", "state", "run", "wait", "tok/s", "KV", "used"]
    assert first.split() == ["worker-0", "ready", "3/16", "2", "35", "120/1024"]
    assert shown(8)[:2] == ["worker", "worker-0"]


def test_workers_that_share_kv_memory_show_what_they_hold_and_how_many_requests_they_can_run() -> None:
    sharing = rows()[0]._replace(max_running=8, kv_pool_bytes=24 << 20)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(make_table([sharing, rows()[1]], (), 200))
    head, first, second, *_ = captured.get().splitlines()
    assert "KV held" in head
    assert first.split()[4] == "3/8"
    assert first[head.index("KV held") :].split()[0] == "24M"
    assert second[head.index("KV held") :][:7].strip() == ""


def test_no_width_cuts_a_cell() -> None:
    for width in range(10, 160):
        assert not any("…" in line for line in shown(width)[:4]), width
    assert " ".join(shown(180)[0].split()) == (
        "worker model state role run wait prefill tok/s KV used expected cached copies kept fetched indexed hits "
        "events token ms step ms"
    )


def test_blocks_that_move_are_told_of_where_there_are_copies() -> None:
    caption = str(make_table(rows()).caption).splitlines()
    assert caption[1] == "2100 blocks copied to host memory, 270 fetched from other workers"
    none = [row._replace(host_blocks=0) for row in rows()]
    assert len(str(make_table(none).caption).splitlines()) == 1


@pytest.mark.parametrize(
    ("uploads", "lines"), [(0, []), (3, ["3 large requests arriving in parts, of which 1.5 MiB came"])]
)
def test_large_requests_are_told_of_while_there_are_any(uploads: int, lines: list[str]) -> None:
    router = messages.RouterStats(
        router_id="r",
        decisions=0,
        decisions_per_s=0.0,
        decision_p50_us=0.0,
        decision_p99_us=0.0,
        waiting=0,
        indexed_blocks=0,
        predicted_hit_rate=0.0,
        hit_rate=0.0,
        uploads=uploads,
        upload_bytes=3 << 19,
    )
    caption = str(make_table(rows(), [router]).caption)
    assert [line for line in caption.splitlines() if "parts" in line] == lines


def test_memory_and_uptime_are_shown_of_workers_that_tell_them() -> None:
    memory = messages.WorkerMemory(
        0, front_mib=100, engine_mib=2_048, engine_since_s=60, devices=[("host", 8_192, 1_536), ("CUDA0", 81_920, 700)]
    )
    started_ms = round(1e3 * (time.time() - 7_560))
    silent, telling, last = rows()
    some = [silent, telling._replace(memory=memory, since_ms=started_ms), last]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(make_table(some, width=200))
    head, first, second, *_ = captured.get().splitlines()
    assert [name in head.split() for name in ("memory", "free", "up")] == [True] * 3
    assert "2.1G" not in first
    for text in ("2.1G", "host 1.5G CUDA0 700M", "2h 5m"):
        assert text in second


def test_a_worker_s_health_is_said_in_one_line() -> None:
    gpu = messages.DeviceHealth(
        name="CUDA0", kind="gpu", total_bytes=80 << 30, free_bytes=7 << 30, description="NVIDIA H100", layers=24
    )
    host = messages.DeviceHealth(name="host", kind="cpu", total_bytes=8 << 30, free_bytes=3 << 29)
    health = messages.WorkerHealth(
        devices=[host, gpu], front_bytes=100 << 20, engine_bytes=0, uptime_s=75.0, engine_uptime_s=0.0
    )
    assert health_text(health) == (
        "takes 100M; host 1.5G of 8.0G free; CUDA0 (NVIDIA H100, 24 layers) 7.0G of 80.0G free; "
        "up for 1m 15s, no engine"
    )
    assert health_text(codec.replace(health, engine_uptime_s=5.0)).endswith("up for 1m 15s, engine for 5s")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.9, "1m 0s"), (61, "1m 1s"), (3_600, "1h 0m"), (90_000, "1d 1h")]
)
def test_a_time_is_said_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_the_list_of_models_names_adapters_as_requests_do_and_who_lacks_them() -> None:
    style = messages.CardAdapter(name="style", digest="d")
    workers = [codec.replace(card("worker-1"), adapters=[style]), card("worker-2")]
    served = messages.ServedModel(
        model="demo", context_length=512, features=[], adapters=["style", "tone"], workers=workers
    )
    assert list(adapters_of(served)) == ["demo:style (not at worker-2)", "demo:tone (not at worker-1, worker-2)"]
    alone = messages.ServedModel(model="demo", context_length=512, features=[], adapters=["style"])
    assert list(adapters_of(alone)) == ["demo:style"]


class Told:
    """An event that has always happened."""

    def clear(self) -> None: ...

    async def wait(self) -> None: ...


class Viewer:
    """A view of workers with these names."""

    changed = Told()
    problem = ""

    def __init__(self, *names: str) -> None:
        self.picture = FleetPicture()
        Sender(fleet_of(*map(card, names))).send(self.picture, whole=True)

    @contextlib.asynccontextmanager
    async def view_fleet(self) -> AsyncIterator["Viewer"]:
        yield self


async def test_without_a_terminal_one_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(once=False, json=False, model=None)
    assert await asyncio.wait_for(top._top(options, cast("WireClient", Viewer("ada"))), 5.0) == 0
    assert "ada" in capsys.readouterr().out


async def test_a_model_that_no_worker_serves_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(once=True, json=False, model="other")
    assert await asyncio.wait_for(top._top(options, cast("WireClient", Viewer("ada"))), 5.0) == 0
    assert capsys.readouterr().out.strip() == "no worker serves the model other"


def test_arrow_keys_turn_the_pages_of_a_fleet_that_the_screen_can_not_show() -> None:
    pages, console, names = top._Pages(), Console(width=120), list("abcde")
    workers = [row._replace(worker_id=name) for name, row in zip(names, itertools.cycle(rows()), strict=False)]
    workers[4] = workers[4]._replace(state="silent")
    seen = []
    for key in (b"\x1b[A", b"\x1b[B", b"x", b"\x1b[B", b"\x1b[B", b"\x1b[A", b"\x1b[A"):
        with console.capture() as captured:
            console.print(pages.table(workers, [], 120, 2 + top._LINES_AROUND))
        shown = captured.get()
        seen.append("".join(line[0] for line in shown.splitlines()[1:] if line[1:2] == " " and line[0] in "abcde"))
        assert "of 5 workers: 4 ready, 1 silent" in " ".join(shown.split()), shown
        pages.press(key)
    assert seen == ["ab", "ab", "cd", "cd", "e", "e", "cd"]
    assert top._Pages().table([], [], 120, 20).row_count == 0
