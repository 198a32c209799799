"""Where `tokenbus` begins: an early Ctrl-C ends it without a word, whatever it is importing."""

import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["health"]:
        from cli import health  # without the rest: it is asked every few seconds

        sys.exit(health.main(sys.argv[2:]))
    from cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main.main()
