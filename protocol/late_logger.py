"""The logger of modules that the client library uses. structlog is imported when something is logged: where rich is
installed it takes as long to import as the rest of the library, and most programs never log anything."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_configure: Callable[[], None] | None = None


def configure_first(configure: Callable[[], None] | None) -> None:
    """Has a program's logs configured before the next logger is made, and not at all if none is. None takes it back."""
    global _configure
    _configure = configure


def get_logger() -> "FilteringBoundLogger":
    global _configure
    if _configure is not None:
        configure, _configure = _configure, None
        configure()
    import structlog

    logger: FilteringBoundLogger = structlog.get_logger()
    return logger
