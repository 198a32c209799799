"""The brokers of the system: which connections they have, and closing one of these."""

from datetime import datetime

import msgspec
import structlog

from tokenbus.protocol.bus.bus import Bus

_PAGE = 2_048
"""Connections that a broker lists at a time."""


class ListedConnection(msgspec.Struct):
    cid: int
    start: datetime
    authorized_user: str = ""


class ConnectionList(msgspec.Struct):
    server_id: str
    now: datetime
    total: int = 0
    offset: int = 0
    connections: list[ListedConnection] = []

    @property
    def following(self) -> int | None:
        """The offset of the next page, if there is one."""
        end = self.offset + len(self.connections)
        return end if self.connections and end < self.total else None


class _Reply(msgspec.Struct):
    data: ConnectionList | None = None


_replies = msgspec.json.Decoder(_Reply)


class Brokers:
    """All brokers of a cluster, as they are asked over the system account."""

    def __init__(self, bus: Bus, account: str) -> None:
        """`bus` is a connection to the system account, `account` the account of the clients."""
        self.bus = bus
        self._account = account
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Brokers with clients in {self._account}>"

    def ask(self, reply: str, user: str = "", server: str = "PING", offset: int = 0) -> None:
        """Asks one broker, or all of them, for the connections of a user, or of all, the oldest first."""
        asked: dict[str, object] = {"auth": True, "acc": self._account, "sort": "cid", "limit": _PAGE, "offset": offset}
        if user:
            asked["user"] = user
        self._send(f"{server}.CONNZ", asked, reply)

    def read(self, payload: bytes) -> ConnectionList | None:
        """Returns the list in a broker's answer, or None if there is none."""
        try:
            return _replies.decode(payload).data
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._log.error("nats_error", error=f"a list of connections can't be decoded: {error}")
            return None

    def close(self, server: str, cid: int, reply: str) -> None:
        """Closes a connection. Without a reply subject a broker does nothing; its answer is not needed."""
        self._send(f"{server}.KICK", {"cid": cid}, reply)

    def _send(self, subject: str, asked: dict[str, object], reply: str) -> None:
        try:
            self.bus.publish(f"$SYS.REQ.SERVER.{subject}", msgspec.json.encode(asked), reply)
        except (ConnectionError, RuntimeError) as error:  # the next check repeats it
            self._log.warning("reply_not_sent", error=str(error))
