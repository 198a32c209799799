"""Rates and tables of `tokenbus top`."""

import argparse
import asyncio
from typing import cast

import pytest
from rich.console import Console

from tests.router.builders import card
from tokenbus.cli.commands import top
from tokenbus.cli.commands.models import adapters_of, health_text
from tokenbus.cli.commands.top import Rates, Row, duration_text, make_table
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, messages


def test_a_rate_is_what_was_generated_between_two_looks() -> None:
    rates = Rates()
    assert [rates.update("w", tokens, at) for tokens, at in ((100, 0.0), (150, 1.0), (150, 2.0), (400, 4.5))] == [
        0,
        50,
        0,
        100,
    ]


@pytest.mark.parametrize(("tokens", "at"), [(3, 1.0), (100, 0.0)])
def test_a_counter_that_began_anew_or_no_time_at_all_gives_no_rate(tokens: int, at: float) -> None:
    rates = Rates()
    rates.update("w", 100, 0.0)
    assert rates.update("w", tokens, at) == 0


def test_workers_are_counted_apart() -> None:
    rates = Rates()
    rates.update("a", 0, 0.0)
    rates.update("b", 1_000, 0.0)
    assert (rates.update("a", 10, 1.0), rates.update("b", 1_030, 1.0)) == (10, 30)


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
            30.0,
            12.5,
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
        console.print(make_table(rows(), None, width))
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
        console.print(make_table([sharing, rows()[1]], None, 200))
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
        "events step ms"
    )


def test_blocks_that_move_are_told_of_where_there_are_copies() -> None:
    caption = str(make_table(rows()).caption).splitlines()
    assert caption[1] == "2100 blocks copied to host memory, 270 fetched from other workers, 90 a second"
    none = [row._replace(host_blocks=0) for row in rows()]
    assert len(str(make_table(none).caption).splitlines()) == 1


def test_adapters_are_listed_by_model_with_the_workers_that_lack_one() -> None:
    first, second, third = rows()
    some = [first._replace(adapters=("b", "a")), second._replace(adapters=("a",)), third._replace(model="other")]
    told = [line for line in str(make_table(some).caption).splitlines() if line.startswith("adapters")]
    assert told == ["adapters of qwen2.5-0.5b-instruct: a, b (not at worker-1)"]
    assert "adapters" not in str(make_table(rows()).caption)


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
    caption = str(make_table(rows(), router).caption)
    assert [line for line in caption.splitlines() if "parts" in line] == lines


def test_memory_and_uptime_are_shown_of_workers_that_tell_them() -> None:
    host = messages.DeviceHealth(name="host", kind="cpu", total_bytes=8 << 30, free_bytes=3 << 29)
    gpu = messages.DeviceHealth(name="CUDA0", kind="gpu", total_bytes=80 << 30, free_bytes=700 << 20, layers=24)
    health = messages.WorkerHealth(
        devices=[host, gpu], front_bytes=100 << 20, engine_bytes=2 << 30, uptime_s=9e5, engine_uptime_s=7_500.0
    )
    silent, telling, last = rows()
    some = [silent, telling._replace(health=health), last]
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


async def test_without_a_terminal_one_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Fleet:
        async def models(self, model: str | None) -> messages.ModelsReply:
            served = messages.ServedModel(model="demo", context_length=512, features=[], workers=[card("ada")])
            return messages.ModelsReply(models=[served], limits=messages.ServerLimits(max_request_bytes=1))

    options = argparse.Namespace(once=False, json=False, interval_s=0.0, model=None)
    assert await asyncio.wait_for(top._top(options, cast("WireClient", Fleet())), 5.0) == 0
    assert "ada" in capsys.readouterr().out


class Paged:
    """A router with five workers, as the pages of the screen ask for them."""

    def __init__(self) -> None:
        self.names = ["a", "b", "c", "d", "e"]

    async def models_page(self, asked: messages.ModelsRequest, timeout_s: float) -> messages.ModelsReply:
        assert asked.limit is not None
        left = [name for name in self.names if f"demo.{name}" > (asked.after or "")]
        served = messages.ServedModel(
            model="demo", context_length=512, features=[], workers=[card(name) for name in left[: asked.limit]]
        )
        counts = messages.FleetCounts(
            models=1, workers=5, states={"ready": 4, "silent": 1}, running=3, waiting=0, generated_tokens=9
        )
        return messages.ModelsReply(
            models=[served],
            limits=messages.ServerLimits(max_request_bytes=1),
            summary=messages.UNSET if asked.after else counts,
            next=f"demo.{left[asked.limit - 1]}" if len(left) > asked.limit else messages.UNSET,
        )

    async def models(self, timeout_s: float, model: str | None, *, with_workers: bool) -> messages.ModelsReply:
        assert not with_workers
        return await self.models_page(messages.ModelsRequest(limit=0), timeout_s)


async def test_arrow_keys_turn_the_pages_of_a_fleet_that_the_screen_can_not_show() -> None:
    pages, rates, console = top._Pages(cast("WireClient", Paged()), None), top.FleetRates(), Console(width=120)

    async def look() -> str:
        with console.capture() as captured:
            console.print(await pages.table(rates, 120, 2 + top._LINES_AROUND))
        return captured.get()

    seen = []
    for key in (b"\x1b[A", b"\x1b[B", b"x", b"\x1b[B", b"\x1b[B", b"\x1b[A", b"\x1b[A"):
        shown = await look()
        seen.append("".join(line[0] for line in shown.splitlines()[1:] if line[1:2] == " " and line[0] in "abcde"))
        assert "of 5 workers: 4 ready, 1 silent" in " ".join(shown.split()), shown
        pages.press(key)
    assert seen == ["ab", "ab", "cd", "cd", "e", "e", "cd"]
