"""Network namespaces for sites: each has a broker, which the machine reaches as if on a local network, and which
reaches those of other sites only through cables.

Needs root, `ip` and /dev/net/tun. The kernel's netem would do for delays and losses, but not every kernel has it."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenbus.cli.console import nats_server
from tokenbus.protocol.process.parent import end_with_parent

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
CLIENT_PORT, LINK_PORT = 4222, 7222


class Site:
    """One site: its namespace, and its broker if it runs."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.namespace = f"tokenbus-{name}"
        self.local_address = f"10.98.{number + 1}.2"
        """Under which clients, routers and workers of the site reach the broker."""
        self.far_address = f"10.99.0.{number + 1}"
        """Under which other sites' brokers reach it."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.local_address}:{CLIENT_PORT}"

    async def start_broker(self, folder: Path, settings: str) -> None:
        """Starts a nats-server with further settings, and waits until it answers."""
        config = folder / f"{self.name}.conf"
        own = f'server_name: {self.name}\nlisten: "{self.local_address}:{CLIENT_PORT}"\n{nats_server.DEFAULTS}'
        config.write_text(own + settings)
        command = ["ip", "netns", "exec", self.namespace, nats_server.find_binary(), "-c", str(config)]
        with (folder / f"nats-{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
            )
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(self.local_address, CLIENT_PORT)
                    writer.close()
                    return
                await asyncio.sleep(0.05)

    async def stop_broker(self) -> None:
        """Ends the broker at once."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None


class Network:
    """The sites, and the cables between them."""

    def __init__(self, sites: Sequence[Site], cables: "subprocess.Popen[bytes]") -> None:
        self.sites = {site.name: site for site in sites}
        self._cables = cables
        self._rtt_s = self._loss = 0.0
        self._cut: list[list[int]] = []

    def set_links(self, rtt_s: float, loss: float) -> None:
        """Makes all cables so long, and lets them lose this share of the packets."""
        self._rtt_s, self._loss = rtt_s, loss
        self._tell()

    def cut_off(self, name: str) -> None:
        """Cuts a site's cables: packets vanish, and nothing says so."""
        here = self.sites[name].number
        self._cut = [[here, site.number] for site in self.sites.values() if site.number != here]
        self._tell()

    def restore(self) -> None:
        self._cut = []
        self._tell()

    def _tell(self) -> None:
        assert self._cables.stdin is not None
        said = {"rtt_s": self._rtt_s, "loss": self._loss, "cut": self._cut}
        self._cables.stdin.write(json.dumps(said).encode() + b"\n")
        self._cables.stdin.flush()


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Makes namespaces and cables, and removes them in the end. Raises SystemExit where that is not permitted."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise SystemExit("network namespaces and TUN devices need root and /dev/net/tun")
    sites = [Site(name, number) for number, name in enumerate(names)]
    cables: subprocess.Popen[bytes] | None = None
    devices: list[int] = []
    try:
        devices += map(_open, sites)
        command = [sys.executable, "-m", "bench.sites.cables", *map(str, devices)]
        cables = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=devices, start_new_session=True, preexec_fn=end_with_parent
        )
        yield Network(sites, cables)
    finally:
        if cables is not None:
            cables.kill()
            cables.wait()
        for device in devices:
            os.close(device)
        for site in sites:
            for words in (f"link del tbn{site.number}", f"netns del {site.namespace}"):  # the kernel takes its time
                subprocess.run(["ip", *words.split()], check=False, capture_output=True)


def _open(site: Site) -> int:
    """Makes a site's namespace; returns the file descriptor of its TUN device."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    near, far, cable = f"tbn{site.number}", f"tbf{site.number}", f"tbc{site.number}"
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", cable.encode(), _IFF_TUN | _IFF_NO_PI))
    inside = f"netns exec {site.namespace} ip"
    gateway = site.local_address.rpartition(".")[0] + ".1"
    for words in itertools.chain(
        (f"netns add {site.namespace}", f"link add {near} type veth peer name {far} netns {site.namespace}"),
        (f"addr add {gateway}/24 dev {near}", f"link set {near} up", f"link set {cable} netns {site.namespace}"),
        (f"{inside} link set lo up", f"{inside} addr add {site.local_address}/24 dev {far}"),
        (f"{inside} link set {far} up", f"{inside} addr add {site.far_address}/24 dev {cable}"),
        (f"{inside} link set {cable} up",),
    ):
        done = subprocess.run(["ip", *words.split()], check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"ip {words}: {done.stderr.strip()}")
    return device
