"""Three sites on one machine, rolled and cut off under streams: what was done, and what became of the streams.

Run: .venv/bin/python -m bench.sites [--topology supercluster leafs] [--rtt-ms 0 40 150] [--loss 0.01]
     [--cuts 1.5 5 30] [--streams 32]

Each site has a broker in a network namespace of its own, a router, a simulated worker of the model `everywhere`, and
clients; a third of the streams belong to each. A second model, `far`, has a worker at the last site only. Brokers are
joined by gateways (`supercluster`), or the second and the third are leaf nodes of the first (`leafs`). Their packets go
through cables that are as long as `--rtt-ms` says and lose the share `--loss` of packets, unless the time is 0.

The last site's processes are replaced one after another (its worker, the worker of `far`, its router), its broker is
killed and started again, and then it is cut off from the others for each of `--cuts` seconds: packets vanish, and no
connection is reset. Needs root, for namespaces. What it prints is a transcript for docs/scale.md."""

import argparse
import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
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

    def cut(self, seconds: float) -> Callable[[], Awaitable[None]]:
        async def be_cut() -> None:
            self.net.cut_off(self.sites[-1].name)
            await asyncio.sleep(seconds)
            self.net.restore()

        return be_cut

    def _router(self, site: Site, name: str) -> None:
        self._system.router(name, "--nats", site.url, "--site", site.name)

    def _worker(self, site: Site, name: str) -> None:
        place = ("--nats", site.url, "--site", site.name)
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
async def running(net: Network, topology: str, num_streams: int) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="tokenbus-sites-") as folder:
        fleet = Fleet(net, Path(folder), topology)
        try:
            await fleet.start(num_streams)
            yield fleet
        finally:
            net.restore()
            await fleet.stop()


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
    for text, event in events:
        await asyncio.sleep(_WARM_UP_S)
        started = time.monotonic()
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
        if dropped := [place.site for place in fleet.places if any(at >= started for at in place.dropped_at)]:
            print(f"          plain clients' own connection broke: {', '.join(dropped)}", flush=True)


async def measure(options: argparse.Namespace) -> None:
    for topology in options.topology:
        for rtt_ms in options.rtt_ms:
            loss = options.loss if rtt_ms else 0.0
            with network(_SITES) as net:
                net.set_links(rtt_ms / 1e3, loss)
                print(f"\n{topology}: {', '.join(_SITES)}; round trip {rtt_ms:g} ms, {loss:.0%} of packets lost")
                async with running(net, topology, options.streams) as fleet:
                    await transcribe(fleet, options.cuts)


def main() -> None:
    parser = flags.parser(__doc__, streams=32)
    parser.add_argument("--topology", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 40.0, 150.0])
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--cuts", type=float, nargs="+", default=[1.5, 5.0, 30.0])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
