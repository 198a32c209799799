"""Imports structlog without rich, for Tokenbus's own processes: their entry points import this module first.

Where rich is installed, structlog imports it for coloured tracebacks, which none of our processes print. That takes 54
ms of CPU time at each start, as much as all of numpy. Neither later imports of rich nor applications that use the
client library are affected."""

import sys

if not {"structlog", "rich"} & sys.modules.keys():
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import then fails as if it were not installed
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
