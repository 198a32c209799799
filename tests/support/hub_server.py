"""A server that speaks the Hub's protocol, and fails as the Hub and the way to it do."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import NamedTuple

COMMIT = "a" * 40


class Request(NamedTuple):
    """A request as it came from a client."""

    method: str
    path: str
    range: str


class HubServer:
    """The repositories of a Hub, and what goes wrong there."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.cards: dict[str, dict[str, object]] = {}
        self.gated: set[str] = set()
        self.refused_tokens: set[str] = set()
        self.requests: list[Request] = []
        self.statuses: list[tuple[int, dict[str, str]]] = []
        """The statuses of the next requests, with their headers, instead of what was asked for."""
        self.cuts: list[int] = []
        """After so many bytes the next downloads' connections are cut."""
        self.wrong: list[bytes] = []
        """The next downloads end with these bytes instead of their own."""
        self.ignores_ranges = False
        self.claimed_sizes: dict[str, int] = {}
        self.redirects = True
        """Whether large files come from another host, as from the Hub."""
        self.held_at: int | None = None
        """After so many bytes downloads stop until `go_on` is set."""
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.url = ""
        self.cdn_url = ""

    def downloads(self) -> list[Request]:
        return [request for request in self.requests if request.path.startswith("/cdn/")]


def digest_of(body: bytes) -> str:
    """Returns the name of a file's content: its SHA-256 for a large file, git's SHA-1 for a small one."""
    if is_large(body):
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(f"blob {len(body)}\0".encode() + body).hexdigest()


def is_large(body: bytes) -> bool:
    return len(body) > 1_000


@contextlib.contextmanager
def running(hub: HubServer) -> Iterator[HubServer]:
    """Runs a Hub and the host with its large files."""
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) for _ in range(2)]
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(hub: HubServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(Request(self.command, path, self.headers.get("Range", "")))
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if hub.statuses:
                status, headers = hub.statuses.pop(0)
                self._send(status, b"", headers)
            elif token in hub.refused_tokens:
                self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
            elif path.startswith("/api/models/"):
                self._send_info("/".join(path.split("/")[3:5]))
            elif path.startswith("/cdn/"):
                assert not token, "the token went to another host"
                self._send_file(self._by_digest(path.rpartition("/")[2]))
            else:
                self._resolve(path.strip("/"), token)

        def _resolve(self, path: str, token: str) -> None:
            repo, _, name = path.partition("/resolve/main/")
            body = hub.repositories.get(repo, {}).get(name)
            if repo in hub.gated and not token:
                self._send(401, b"", {"X-Error-Code": "GatedRepo"})
            elif body is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound" if repo in hub.repositories else "RepoNotFound"})
            elif is_large(body) and hub.redirects:
                self._redirect(body)
            else:
                self._send_file(body)

        def _redirect(self, body: bytes) -> None:
            digest = digest_of(body)
            headers = {"Location": f"{hub.cdn_url}/cdn/{digest}", "X-Repo-Commit": COMMIT}
            self._send(302, b"", headers | {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(body))})

        def _by_digest(self, digest: str) -> bytes:
            bodies = [body for files in hub.repositories.values() for body in files.values()]
            return next(body for body in bodies if digest_of(body) == digest)

        def _send_info(self, repo: str) -> None:
            if repo not in hub.repositories:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
                return
            siblings = [self._sibling(name, body) for name, body in hub.repositories[repo].items()]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
            info["cardData"] = hub.cards.get(repo, {})
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

        def _sibling(self, name: str, body: bytes) -> dict[str, object]:
            size = hub.claimed_sizes.get(name, len(body))
            found: dict[str, object] = {"rfilename": name, "size": size, "blobId": digest_of(body)}
            if is_large(body):
                found["lfs"] = {"size": size, "sha256": digest_of(body), "pointerSize": 100}
            return found

        def _send_file(self, body: bytes) -> None:
            tag = {"ETag": f'"{digest_of(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
            if self.command == "GET" and hub.wrong:
                end = hub.wrong.pop(0)
                body = body[: -len(end)] + end
            if not asked or hub.ignores_ranges:
                self._send(200, body, tag)
            elif int(asked) >= len(body):
                self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            else:
                tag["Content-Range"] = f"bytes {asked}-{len(body) - 1}/{len(body)}"
                self._send(206, body[int(asked) :], tag)

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):  # the client was killed
                    self._send_body(body)

        def _send_body(self, body: bytes) -> None:
            if not self.path.startswith("/cdn/"):
                self.wfile.write(body)
            elif hub.cuts:
                self.wfile.write(body[: hub.cuts.pop(0)])
                self.close_connection = True
            elif hub.held_at is not None:
                self.wfile.write(body[: hub.held_at])
                hub.held.set()
                hub.go_on.wait(60)
                self.wfile.write(body[hub.held_at :])
            else:
                self.wfile.write(body)

    return Handler
