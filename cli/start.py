"""Where `tokenbus` begins: Ctrl-C ends it without a word, until a command has something to put in order first."""

import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["health"]:
        from tokenbus.cli.commands import health  # without the rest: it is asked every few seconds

        sys.exit(health.main(sys.argv[2:]))
    from tokenbus.cli import main

    main.main()


if __name__ == "__main__":
    main()
