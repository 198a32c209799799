"""The requests that a command line names: a trace in a file, or a workload."""

from pathlib import Path

from tokenbus.replay import generators, traces


def requests(text: str, seed: int) -> list[traces.TracedRequest]:
    """Those of a file in Mooncake's format, or of a workload as `generators.parse` reads it, by time.

    Raises TraceError, WorkloadError and OSError."""
    path = Path(text)
    return traces.read(path) if path.exists() else generators.generate(*generators.parse(text), seed)
