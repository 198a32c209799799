"""Imports structlog without rich, for the processes of Tokenbus: whoever starts one imports this module first.

Where rich is installed, structlog imports it for tracebacks in color, which no process of ours draws. That takes 54 ms
of CPU time at each start, as much as all of numpy. Later imports of rich are not affected, and neither are
applications that use the client library."""

import sys

if not {"structlog", "rich"} & sys.modules.keys():
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import then fails as if it were not installed
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
