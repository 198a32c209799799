"""A connection to a Tokenbus system, and the requests that can be made over it."""

import secrets
from typing import Any

import msgspec
from nats.aio.msg import Msg

from client.stream import Stream
from protocol import bus, codec, errors, messages, subjects
from protocol import connection as nats

_models = codec.Decoder(messages.ModelsReply)
_embeds = codec.Decoder(messages.EmbedReply)
_cancels = codec.Decoder(messages.CancelReply)

DEFAULT_SILENCE_S = 15.0
"""Three times the longest pause that the wire allows a live stream."""


UNSTREAMED_SILENCE_S = 600.0
"""With `stream=False` nothing comes before the whole answer, so this bounds how long one may take."""


class Client:
    """Open it with `connect`, close it with `close`, or use it as `async with await Client.connect(url) as client`."""

    def __init__(self, connection: bus.Bus, tenant: str, prefix: str, encoding: codec.Encoding) -> None:
        self._connection = connection
        self._tenant = tenant
        self._names = subjects.Subjects(prefix)
        self._encoding = encoding
        self._inbox = connection.new_inbox()
        self._streams: dict[str, Stream] = {}

    def __repr__(self) -> str:
        return f"<Client of {self._connection!r}, {len(self._streams)} streams>"

    @classmethod
    async def connect(
        cls,
        url: str = "nats://127.0.0.1:4222",
        *,
        tenant: str = subjects.DEFAULT_TENANT,
        prefix: str = subjects.DEFAULT_PREFIX,
        encoding: codec.Encoding = codec.Encoding.JSON,
        connect_timeout_s: float = 10.0,
    ) -> "Client":
        """Raises ConnectionError when the broker can't be reached."""
        settings = nats.Settings(url=url, connect_timeout_s=connect_timeout_s)
        connection = await nats.connect(settings, name="tokenbus client")
        client = cls(connection, tenant, prefix, encoding)
        await connection.subscribe(f"{client._inbox}.*", client._deliver)
        return client

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def generate(
        self,
        model: str,
        request: messages.GenerateRequest | None = None,
        *,
        silence_s: float | None = None,
        **fields: Any,
    ) -> Stream:
        """Asks for a completion and returns its stream at once.

        `fields` are those of GenerateRequest: `prompt`, `messages`, `token_ids`, `max_tokens`, `temperature` and so on.
        Raises RequestError(invalid_request) for a field of a wrong type; all else is answered in the stream."""
        request = request or _request_of(fields)
        if request.id is None:
            request = codec.replaced(request, id=secrets.token_urlsafe(16))
        assert request.id is not None
        request_id = request.id
        place = secrets.token_hex(8)
        stream = Stream(
            request_id,
            self._encoding,
            silence_s or (DEFAULT_SILENCE_S if request.stream is not False else UNSTREAMED_SILENCE_S),
            cancel=lambda: self._send_cancel(request_id),
            close=lambda: self._forget(place),
        )
        self._streams[place] = stream
        try:
            self._connection.publish(
                self._names.generate(model, self._tenant),
                codec.encode(request, self._encoding),
                reply=f"{self._inbox}.{place}",
                headers=codec.content_headers(self._encoding),
            )
        except bus.PayloadTooLargeError as error:
            stream.end(errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)))
        except (bus.BusyError, ConnectionError) as error:
            stream.end(errors.make_error(errors.Code.NO_WORKER, str(error)))
        return stream

    async def models(self, timeout_s: float = 5.0) -> messages.ModelsReply:
        """What is being served. Raises RequestError(no_worker) when no router answers."""
        answer = await self._ask(self._names.models_for(self._tenant), b"", timeout_s)
        return _models.decode(answer.data, self._encoding)

    async def embed(self, model: str, request: messages.EmbedRequest, timeout_s: float = 60.0) -> messages.EmbedReply:
        """The embeddings of a request's inputs. Raises RequestError when there are none."""
        subject = self._names.embed(model, self._tenant)
        answer = await self._ask(subject, codec.encode(request, self._encoding), timeout_s)
        reply = _embeds.decode(answer.data, self._encoding)
        if reply.error:
            raise errors.RequestError(reply.error)
        return reply

    async def cancel(self, request_id: str, timeout_s: float = 2.0) -> bool:
        """Cancels any request of this tenant; False when nobody holds one with that id."""
        try:
            answer = await self._connection.request(
                self._names.cancel(request_id, self._tenant),
                b"",
                timeout_s,
                headers=codec.content_headers(self._encoding),
            )
        except (bus.NoRespondersError, TimeoutError):
            return False
        return _cancels.decode(answer.data, self._encoding).cancelled

    async def close(self) -> None:
        """Cancels what still runs and disconnects."""
        for stream in list(self._streams.values()):
            await stream.aclose()
        await self._connection.close()

    async def _ask(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        headers = codec.content_headers(self._encoding)
        try:
            return await self._connection.request(subject, payload, timeout_s, headers=headers)
        except bus.NoRespondersError as error:
            raise errors.request_error(errors.Code.NO_WORKER, "no router listens on this broker") from error
        except (TimeoutError, ConnectionError) as error:
            raise errors.request_error(errors.Code.NO_WORKER, str(error)) from error

    def _deliver(self, message: Msg) -> None:
        stream = self._streams.get(message.subject.rpartition(".")[2])
        if stream is None:
            return
        if bus.is_no_responders(message):
            stream.end(errors.make_error(errors.Code.NO_WORKER, "no router listens on this broker"))
        else:
            stream.feed(message.data)

    def _send_cancel(self, request_id: str) -> None:
        self._connection.publish(self._names.cancel(request_id, self._tenant), b"")

    def _forget(self, place: str) -> None:
        self._streams.pop(place, None)


def _request_of(fields: dict[str, Any]) -> messages.GenerateRequest:
    try:
        return msgspec.convert(msgspec.to_builtins(fields), messages.GenerateRequest)
    except msgspec.ValidationError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error)) from error
