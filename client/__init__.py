"""The async Python client of a Tokenbus system: `async for chunk in client.generate("demo", prompt="...")`."""

from tokenbus.client.client import Client
from tokenbus.client.stream import Stream
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire.errors import RequestError


def application_tracer() -> tracing.Tracer:
    """For `Client.connect(..., traced=...)`: the tracer that the application has set up. Needs the extra `traces`."""
    from tokenbus.protocol.telemetry import otel

    return otel.ApplicationTracer()


__all__ = ["Client", "RequestError", "Stream", "application_tracer"]

if __name__ != "tokenbus.client":
    raise ImportError("import tokenbus.client: it is not a top-level package")
