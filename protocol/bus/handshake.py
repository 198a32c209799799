"""The handshake with the broker: TLS, credentials, and errors that say why the broker refuses this process.

Gaps in nats-py that this module closes (docs/decisions/0004-nats-connection.md):
- It continues in plain text, secrets included, if TLS was requested and the broker, or an impostor, offers none.
- It mistakes a broker that hangs up without an answer for a connection, and reconnects forever.
- After a failed TLS handshake it waits for the end of the stream, which uvloop never reports.
- It closes for good when credentials expire, even if they have been renewed.
- A secret file that has become invalid silently ends its reconnect attempts, or hangs the process.
"""

import asyncio
import ssl
from typing import Any

import nats.errors
from nats.aio import client
from nats.aio.transport import TcpTransport

from tokenbus.protocol.bus.settings import BusSettings


class BrokerRefusedError(ConnectionError):
    """The broker refuses this process, and trying again won't help. The text is a predicate whose subject is the
    broker, and says what to do."""


class HandshakeClient(client.Client):
    """nats-py's client with these gaps closed. Files are read at each connect, since they may have been renewed."""

    def __init__(self, settings: BusSettings) -> None:
        super().__init__()
        self._credentials = settings.credentials
        self._tls = settings.tls
        self._insists_on_tls = settings.insists_on_tls

    @property
    def ssl_context(self) -> ssl.SSLContext:
        try:
            return self._tls.context()
        except ValueError as error:
            raise OSError(str(error)) from error

    @property
    def asks_who_connects(self) -> bool:
        """Whether the broker has greeted this process, and wants to know who it is."""
        return bool(self._server_info.get("auth_required"))

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except (OSError, nats.errors.Error) as error:
            await self._hang_up()
            raise self._explained(error) from error
        if not self.is_connected:
            await self._hang_up()
            raise self._explained(ConnectionResetError("it closes the connection without an answer"))

    async def _hang_up(self) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
            self._transport = None  # the next attempt makes one
            await asyncio.sleep(0)  # lets the event loop close the socket

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Runs before TLS begins and before anything is sent."""
        if initial_connection:
            self._agree_on_tls(info)
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        if "authentication expired" in err_msg.lower():
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg}"))
        else:
            await super()._process_err(err_msg)

    def _agree_on_tls(self, info: dict[str, Any]) -> None:
        if self._insists_on_tls:
            if not info.get("tls_required") and not info.get("tls_available"):
                raise BrokerRefusedError("does not speak TLS: enable it there, or use a nats:// URL without --nats-ca")
            info["tls_required"] = True  # nats-py does not use TLS that the broker offers but does not require
        if info.get("tls_required") and info.get("tls_verify") and not self._tls.cert_file:
            raise BrokerRefusedError("asks for a certificate: pass --nats-cert FILE and --nats-key FILE")

    def _connect_command(self) -> bytes:
        try:
            keys = self._credentials.keys()
        except ValueError as error:
            raise OSError(str(error)) from error
        if keys is not None:
            self._auth_configured = True
            self._signature_cb = keys.sign
            self._user_jwt_cb = keys.jwt.encode if keys.jwt else None
            self._public_nkey = keys.public
        return super()._connect_command()

    def _explained(self, error: Exception) -> Exception:
        """Turns an error that means a refusal into one that says so; returns other errors unchanged."""
        match error:
            case BrokerRefusedError() | ssl.SSLEOFError():
                return error
            case ssl.SSLCertVerificationError():
                advice = "pass --nats-ca FILE with the authority that signed it, and use a name that is in it"
                return BrokerRefusedError(f"has a certificate that can't be trusted ({error.verify_message}): {advice}")
            case ssl.SSLError() | ConnectionError() if self._server_info.get("tls_verify"):
                return BrokerRefusedError(f"does not accept the certificate ({error}): see --nats-cert and --nats-key")
            case ssl.SSLError():
                return BrokerRefusedError(f"and this process have no TLS version or cipher in common ({error.reason})")
            case nats.errors.Error() if _is_refusal(reason := str(error).lower()):
                return BrokerRefusedError(f"refuses the credentials ({reason}): {self._advice}")
        return error

    @property
    def _advice(self) -> str:
        given = self._credentials
        if given.creds_file:
            return f"is --nats-creds {given.creds_file} meant for this broker, and still valid?"
        if given.nkey_file:
            return f"does it know the public key of --nats-nkey {given.nkey_file}?"
        if given.token:
            return "see the variable TOKENBUS_NATS_TOKEN"
        if given.user:
            return "see --nats-user and the variable TOKENBUS_NATS_PASSWORD"
        return "pass --nats-user or another of the --nats flags for credentials"


def _is_refusal(reason: str) -> bool:
    """Judges by nats-server's wording. An authentication timeout says nothing about the credentials."""
    return "authorization" in reason or ("authentication" in reason and "timeout" not in reason)
