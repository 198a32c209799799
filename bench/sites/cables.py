"""Carries IP packets between network namespaces: late, with losses, and not at all where a cable is cut.

Started by `bench.sites.network`, which passes a TUN device for each site, and writes a line of JSON for each change:
`{"rtt_s": 0.04, "loss": 0.01, "cut": [[0, 1]]}`. A process of its own, so that no other work makes packets late."""

import asyncio
import json
import os
import random
import sys

_MAX_PACKET_BYTES = 65_536
_DESTINATION = slice(16, 20)
_MAX_AT_ONCE = 64


class Cables:
    """One cable between each two sites, which are numbered from 0; site n has the address that ends with n + 1."""

    def __init__(self, devices: list[int]) -> None:
        self.rtt_s = 0.0
        self.loss = 0.0
        self.cut: set[frozenset[int]] = set()
        self._devices = devices
        self._rng = random.Random(1)

    def carry(self, site: int) -> None:
        """Takes packets that a site sends."""
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_AT_ONCE):
            try:
                packet = os.read(self._devices[site], _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            target = packet[_DESTINATION][-1] - 1
            is_ip = packet[0] >> 4 == 4 and 0 <= target < len(self._devices)
            if is_ip and frozenset((site, target)) not in self.cut and self._rng.random() >= self.loss:
                loop.call_later(self.rtt_s / 2, self._deliver, site, target, packet)

    def _deliver(self, site: int, target: int, packet: bytes) -> None:
        if frozenset((site, target)) not in self.cut:
            os.write(self._devices[target], packet)


async def main() -> None:
    devices = [int(argument) for argument in sys.argv[1:]]
    cables = Cables(devices)
    loop = asyncio.get_running_loop()
    for site, device in enumerate(devices):
        os.set_blocking(device, False)
        loop.add_reader(device, cables.carry, site)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        said = json.loads(line)
        cables.rtt_s, cables.loss = said["rtt_s"], said["loss"]
        cables.cut = {frozenset(pair) for pair in said["cut"]}


if __name__ == "__main__":
    asyncio.run(main())
