"""Three sites on one machine, rolled and cut off under streams: what was done, and what became of the streams.

Run: .venv/bin/python -m bench.sites [--topology supercluster leafs] [--rtt-ms 0 40 150] [--loss 0.01]
     [--cuts 1.5 5 30] [--streams 32] [--logs FOLDER]

Each site has a broker in a network namespace of its own, a router, a simulated worker of the model `everywhere`, and
clients; a third of the streams belong to each. A second model, `far`, has a worker at the last site only. Brokers are
joined by gateways (`supercluster`), or the second and the third are leaf nodes of the first (`leafs`). Their packets go
through cables that are as long as `--rtt-ms` says and lose the share `--loss` of packets, unless the time is 0.

The last site's processes are replaced one after another (its worker, the worker of `far`, its router), its broker is
killed and started again, and then it is cut off from the others for each of `--cuts` seconds: packets vanish, and no
connection is reset. Needs root, for namespaces. What it prints is a transcript for docs/scale.md, with what the logs
say of each stream that was lost; `--logs` keeps them."""

import argparse
import asyncio
import contextlib
import itertools
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path

import structlog

from bench import flags
from bench.sites.network import LINK_PORT, Network, Site, network
from bench.sites.streams import Place, Record, told
from tests.support.system import System
from tokenbus.cli.console.nats_server import NatsServer
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages

_SITES = ("eu", "us", "ap")
_WORKER = ("--engine", "sim", "--sim-speedup", "5")
_MODEL = "steps-of-50ms"
_MAX_TOKENS = 300
"""3 s of the simulated worker."""
_DEADLINE = 'write_deadline: "2s"'
"""Of links: until it is over, a broker that has noticed that a link is down may wait for its last write."""
_WARM_UP_S = 5.0
_UNDISTURBED_S = 6.0
_RETURN_S = 3.0
"""Time after an event in which streams that begin still belong to it."""
_PATIENCE_S = 100.0
"""Time after which streams that have not ended count as still running."""
_MAX_STORIES = 10
"""Lost streams of which all is told, in the end: while the logs are read, no client reads its messages."""
_TOLD = ("worker_id", "attempt", "finish_reason", "code", "tokens", "completion_tokens", "offset")
"""The fields of log lines about a lost stream."""


def _gateways(site: Site, sites: list[Site]) -> str:
    remotes = ", ".join(f'{{ name: {one.name}, urls: ["nats://{one.far_address}:{LINK_PORT}"] }}' for one in sites)
    return (
        f'cluster {{ name: {site.name}, listen: "127.0.0.1:6222" }}\n'
        f'gateway {{ name: {site.name}, listen: "{site.far_address}:{LINK_PORT}", connect_retries: 1000000\n'
        f"{_DEADLINE}\n"
        f"gateways: [{remotes}] }}\n"
    )


def _leafs(site: Site, sites: list[Site]) -> str:
    hub = sites[0]
    if site is hub:
        return f'leafnodes {{ listen: "{hub.far_address}:{LINK_PORT}", no_advertise: true, {_DEADLINE} }}\n'
    return (
        f'leafnodes {{ remotes: [{{ url: "nats://{hub.far_address}:{LINK_PORT}" }}], reconnect: "1s", {_DEADLINE} }}\n'
    )


TOPOLOGIES: dict[str, Callable[[Site, list[Site]], str]] = {"supercluster": _gateways, "leafs": _leafs}


class _Brokers(NatsServer):
    """Stands for the brokers of all sites, which are ended by others."""

    def __init__(self, url: str) -> None:
        self.url = url

    def stop(self) -> None:
        """Does nothing."""


class Fleet:
    """The processes of all sites."""

    def __init__(self, net: Network, folder: Path, topology: str) -> None:
        self.net = net
        self.sites = list(net.sites.values())
        self._folder = folder
        self._settings = TOPOLOGIES[topology]
        self._system = System(_Brokers(self.sites[0].url), folder)
        self.places: list[Place] = []
        self._num_started = 0
        self._names: list[str] = []

    @property
    def records(self) -> list[Record]:
        return [one for place in self.places for one in place.records]

    async def start(self, num_streams: int) -> None:
        for site in self.sites:
            await site.start_broker(self._folder, self._settings(site, self.sites))
        for site in self.sites:
            self._router(site, f"router-{site.name}")
            self._worker(site, f"everywhere-{site.name}")
        self._worker(self.sites[-1], "far")
        await self._until_ready(self.sites, len(self.sites) + 1)
        for site in self.sites:
            self.places.append(Place(site.name, site.url, _MAX_TOKENS))
            await self.places[-1].open()
        for number in range(num_streams):
            place = self.places[number % len(self.places)]
            model = "far" if number // len(self.places) % 2 else "everywhere"
            crosses = model == "far" and place is not self.places[-1]
            place.run(model, plain=bool(number % 2), crosses=crosses)

    async def stop(self) -> None:
        for place in self.places:
            await place.close()
        await self._system.stop()
        for site in self.sites:
            await site.stop_broker()

    async def roll(self) -> None:
        """Replaces the last site's processes one after another: each is told to leave when its successor is ready."""
        site = self.sites[-1]
        for name, start in (
            (f"everywhere-{site.name}", self._worker),
            ("far", self._worker),
            (f"router-{site.name}", self._router),
        ):
            self._num_started += 1
            start(site, f"{name}-{self._num_started}")
            if start == self._worker:
                await self._until_ready(self.sites[-1:], len(self.sites) + 2)
            else:
                await asyncio.sleep(2.0)
            self._system.signal(name, signal.SIGTERM)
            await self._system.wait(name)

    async def restart_broker(self) -> None:
        site = self.sites[-1]
        await site.stop_broker()
        await asyncio.sleep(1.0)
        await site.start_broker(self._folder, self._settings(site, self.sites))

    @property
    def num_broken_links(self) -> int:
        """How often a connection between brokers has been closed so far. Both ends tell, unless one was killed."""
        told = [(self._folder / f"nats-{site.name}.log").read_bytes() for site in self.sites]
        ends = sum(log.count(b"%s connection closed" % kind) for log in told for kind in (b"Leafnode", b"Gateway"))
        return (ends + 1) // 2

    def cut(self, seconds: float) -> Callable[[], Awaitable[None]]:
        async def be_cut() -> None:
            self.net.cut_off(self.sites[-1].name)
            await asyncio.sleep(seconds)
            self.net.restore()

        return be_cut

    def story(self, record: Record, began: float) -> list[str]:
        """Returns lines about what became of a stream, by its client and by the logs. Times count from `began`."""
        kind = "plain" if record.is_plain else "library"
        last = record.heard_at[-1] - began if record.heard_at else 0.0
        now = time.time() - time.monotonic()
        lines = [
            f"lost: {kind}, {record.site}, model {record.model}, {record.request_id}: {record.end or 'still running'}, "
            f"begun at {record.began_at - began:.1f} s, {record.tokens} tokens until {last:.1f} s"
        ]
        told = []
        for name in self._names:
            for line in self._system.log(name):
                if str(line.get("request_id", "")).endswith(record.request_id):
                    at = datetime.fromisoformat(str(line["timestamp"])).timestamp() - now - began
                    rest = (f"{key} {line[key]}" for key in _TOLD if line.get(key) is not None)
                    told.append((at, f"  {at:.1f} s {name}: {line['event']}, {', '.join(rest)}"))
        return lines + [text for _, text in sorted(told)]

    def _router(self, site: Site, name: str) -> None:
        self._names.append(name)
        self._system.router(name, "--nats", site.url, "--site", site.name)

    def _worker(self, site: Site, name: str) -> None:
        place = ("--nats", site.url, "--site", site.name)
        self._names.append(name)
        self._system.worker(name, *_WORKER, *place, model=_MODEL, served_name=name.partition("-")[0])

    async def _until_ready(self, sites: list[Site], count: int) -> None:
        """Waits until routers of these sites have as many workers that are ready."""
        for site in sites:
            async with asyncio.timeout(120), await WireClient.connect(site.url) as client:
                while True:
                    with contextlib.suppress(errors.RequestError):
                        cards = (await client.models(timeout_s=1.0)).cards
                        if sum(card.state is messages.WorkerState.READY for card in cards) >= count:
                            break
                    await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def running(net: Network, topology: str, num_streams: int, logs: Path | None) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tokenbus-sites-") as folder:
        fleet = Fleet(net, Path(folder), topology)
        try:
            await fleet.start(num_streams)
            yield fleet
        finally:
            net.restore()
            await fleet.stop()
            if logs is not None:
                shutil.copytree(folder, logs, dirs_exist_ok=True)


async def transcribe(fleet: Fleet, cuts: list[float]) -> None:
    """Lets one event after another happen, and prints what became of the streams."""
    began = time.monotonic()
    last = fleet.sites[-1].name
    events: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        (f"nothing happens for {_UNDISTURBED_S:g} s", lambda: asyncio.sleep(_UNDISTURBED_S)),
        (f"the workers and the router of {last} are replaced", fleet.roll),
        (f"the broker of {last} is killed, and starts again a second later", fleet.restart_broker),
        *((f"{last} is cut off for {seconds:g} s", fleet.cut(seconds)) for seconds in cuts),
    ]
    lost: list[Record] = []
    for text, event in events:
        await asyncio.sleep(_WARM_UP_S)
        started, num_broken = time.monotonic(), fleet.num_broken_links
        await event()
        await asyncio.sleep(_RETURN_S)
        ran = [one for one in fleet.records if one.ended_at is None or one.ended_at >= started]
        print(f"{started - began:6.1f} s  {text}", flush=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while any(one.ended_at is None for one in ran):
                    await asyncio.sleep(0.1)
        for line in told(ran, started):
            print(f"          {line}", flush=True)
        if count := fleet.num_broken_links - num_broken:
            print(f"          connections between brokers closed: {count}", flush=True)
        lost += [one for one in ran if one.is_lost and one not in lost]
    for line in itertools.chain.from_iterable(fleet.story(one, began) for one in lost[:_MAX_STORIES]):
        print(line, flush=True)


async def measure(options: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that no namespace stays
    for topology in options.topology:
        for rtt_ms in options.rtt_ms:
            loss = options.loss if rtt_ms else 0.0
            with network(_SITES) as net:
                net.set_links(rtt_ms / 1e3, loss)
                print(f"\n{topology}: {', '.join(_SITES)}; round trip {rtt_ms:g} ms, {loss:.0%} of packets lost")
                logs = None if options.logs is None else options.logs / f"{topology}-{rtt_ms:g}"
                async with running(net, topology, options.streams, logs) as fleet:
                    await transcribe(fleet, options.cuts)


def main() -> None:
    parser = flags.parser(__doc__, streams=32)
    parser.add_argument("--topology", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 40.0, 150.0])
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--cuts", type=float, nargs="+", default=[1.5, 5.0, 30.0])
    parser.add_argument("--logs", type=Path, help="folder in which the logs are kept (they are not)")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        asyncio.run(measure(parser.parse_args()))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


if __name__ == "__main__":
    main()
