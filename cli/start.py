"""The entry point of `tokenbus`. Ctrl-C ends the process silently until a command installs its own handler."""

import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["health"]:
        from tokenbus.cli.commands import health  # the rest takes a second of CPU, and containers run this all the time

        sys.exit(health.main(sys.argv[2:]))
    from tokenbus.cli.console import needs

    if sys.argv[1:2] and sys.argv[1] in {*needs.EXTRAS, "doctor"}:  # the others hardly ever log
        import tokenbus.protocol.process.lean_imports  # noqa: F401  # before structlog
    from tokenbus.cli import main

    main.main()


if __name__ == "__main__":
    main()
