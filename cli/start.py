"""Where `tokenbus` begins: an early Ctrl-C ends it without a word, whatever it is importing."""

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main.main()
