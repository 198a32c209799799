"""The logger of modules that the client library uses. structlog is imported when something is logged: where rich is
installed it takes as long to import as the rest of the library, and most programs never log anything."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def get_logger() -> "FilteringBoundLogger":
    import structlog

    logger: FilteringBoundLogger = structlog.get_logger()
    return logger
