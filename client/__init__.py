"""The async Python client of a Tokenbus system: `async for chunk in client.generate("demo", prompt="...")`."""

from client.client import Client
from client.stream import Stream
from protocol import traces


def application_traces() -> traces.Traces:
    """For `Client.connect(..., traced=...)`: the tracer that the application has set up. Needs the extra `traces`."""
    from protocol import otel

    return otel.OfApplication()


__all__ = ["Client", "Stream", "application_traces"]
