"""The client for programs without an event loop: each method waits for that of `Client`, in a thread of its own."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self, Unpack

from tokenbus.client.answer import Answer, AnswerChunk
from tokenbus.client.client import Client
from tokenbus.client.connecting import ConnectOptions
from tokenbus.client.loop_thread import LoopThread, NoLoopError
from tokenbus.client.replies import Embeddings, PromptTokens, Ranking, ServedModelInfo
from tokenbus.client.stream import Stream, read_ready
from tokenbus.client.wire.request_fields import (
    DetokenizeFields,
    EmbedFields,
    GenerateFields,
    RerankFields,
    TokenizeFields,
)


class SyncStream:
    """An iterator of chunks that raises a TokenbusError, with the text so far, if the request fails.

    Ctrl-C while it waits cancels the request, as does leaving its `with` block, or keeping no reference to it."""

    def __init__(self, stream: Stream, client: "SyncClient", thread: LoopThread) -> None:
        self._stream = stream
        self._client = client
        """Kept, since a client that nothing refers to is closed."""
        self._thread = thread
        self._ready: deque[AnswerChunk] = deque()
        """Chunks that came together with an earlier one."""

    def __repr__(self) -> str:
        return repr(self._stream).replace("Stream", "SyncStream", 1)

    @property
    def request_id(self) -> str:
        """The request's id, by which logs and `cancel` know it. It changes when a lost request continues."""
        return self._stream.request_id

    @property
    def so_far(self) -> Answer:
        """The answer as far as it has arrived."""
        try:
            return self._thread.call(lambda: self._stream.so_far)  # there it is not written at the same time
        except NoLoopError:
            return self._stream.so_far

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnswerChunk:
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                chunks = self._thread.run(read_ready(self._stream))
            if not chunks:
                raise StopIteration
            self._ready.extend(chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream and cancels the request, unless it has ended. Idempotent."""
        with contextlib.suppress(NoLoopError):  # the client was closed, and its streams with it
            self._thread.run(self._stream.aclose())

    def cancel(self) -> None:
        """Cancels the request. The stream then ends, without an error, with what the model had generated."""
        self._thread.call(self._stream.cancel)

    def text(self, timeout_s: float | None = None) -> str:
        """Waits for the end and returns the whole text, including what has been read before. After `timeout_s` it
        cancels the request and raises TimeoutError."""
        return self._thread.run(self._stream.text(), timeout_s)

    def answer(self, timeout_s: float | None = None) -> Answer:
        """Waits for the end and returns the whole answer, including what has been read before. After `timeout_s` it
        cancels the request and raises TimeoutError."""
        return self._thread.run(self._stream.answer(), timeout_s)


class SyncClient:
    """A connection to a Tokenbus system, for programs and notebooks without `await`: `with SyncClient() as client:`.

    Any number of threads may use it at the same time; a process that was forked needs one of its own. Its methods are
    those of `Client`, and raise the same errors. Ctrl-C cancels the request that it interrupts."""

    def __init__(self, url: str | None = None, **options: Unpack[ConnectOptions]) -> None:
        """Takes what `Client` takes."""
        self._client = Client(url, **options)
        self._thread: LoopThread | None = None
        self._connecting = threading.Lock()

    def __repr__(self) -> str:
        return f"<SyncClient over {self._client!r}>"

    @classmethod
    def connect(cls, url: str | None = None, **options: Unpack[ConnectOptions]) -> Self:
        """Returns a connected client; close it with `close`."""
        return cls(url, **options).__enter__()

    def __enter__(self) -> Self:
        with self._connecting:
            if self._thread is None:
                self._thread = LoopThread.start(self._client)
                # also when the program ends, so that its requests do
                self._stop = weakref.finalize(self, self._thread.stop)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels all running requests and disconnects. Idempotent."""
        if self._thread is not None:
            self._thread = None
            self._stop()

    def generate(
        self,
        model: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        resume: bool = True,
        **fields: Unpack[GenerateFields],
    ) -> SyncStream:
        """Requests a completion and returns its stream at once: iterate it, or wait for its `text()` or `answer()`.

        Pass `prompt`, `messages` or `token_ids`, and any other field of the request; docs/wire.md says what they mean.
        Raises InvalidRequestError for an unknown field or a value of a wrong type. The stream raises all others."""
        thread = self._open
        stream = thread.call(lambda: self._client.generate(model, headers=headers, resume=resume, **fields))
        return SyncStream(stream, self, thread)

    def embed(self, model: str | None = None, **fields: Unpack[EmbedFields]) -> Embeddings:
        """Returns a vector for each `input`: one text, or a list of texts or lists of token ids."""
        return self._open.run(self._client.embed(model, **fields))

    def rerank(self, model: str | None = None, **fields: Unpack[RerankFields]) -> Ranking:
        """Returns the `documents` in the order of their relevance to the `query`."""
        return self._open.run(self._client.rerank(model, **fields))

    def tokenize(self, model: str | None = None, **fields: Unpack[TokenizeFields]) -> PromptTokens:
        """Returns the tokens of a `prompt` or of `messages`, or with `only_count` their number."""
        return self._open.run(self._client.tokenize(model, **fields))

    def detokenize(self, model: str | None = None, **fields: Unpack[DetokenizeFields]) -> str:
        """Returns the text that `token_ids` have in an answer."""
        return self._open.run(self._client.detokenize(model, **fields))

    def models(self, timeout_s: float = 5.0) -> list[ServedModelInfo]:
        """Returns the models that are being served. Raises UnavailableError if no router answers in time."""
        return self._open.run(self._client.models(timeout_s))

    def cancel(self, request_id: str, timeout_s: float = 2.0) -> bool:
        """Cancels any request of this tenant, whoever made it; its stream raises RequestCancelledError. Returns False
        if no process holds a request with that id."""
        return self._open.run(self._client.cancel(request_id, timeout_s))

    def keep_session(self, model: str | None = None, *, session_id: str, ttl_s: float = 300.0) -> None:
        """Asks the model's workers to keep the cached prefixes of one of this tenant's sessions for that long."""
        self._open.run(self._client.keep_session(model, session_id=session_id, ttl_s=ttl_s))

    def end_session(self, model: str | None = None, *, session_id: str) -> None:
        """Says that one of this tenant's sessions has ended: what only it has cached is evicted first."""
        self._open.run(self._client.end_session(model, session_id=session_id))

    @property
    def _open(self) -> LoopThread:
        """The thread of the connected client. Raises RuntimeError if there is none."""
        if self._thread is None:
            raise RuntimeError(
                "this client is not connected: use `with SyncClient() as client`, or SyncClient.connect()"
            )
        return self._thread
