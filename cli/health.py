"""`tokenbus health`: what containers ask to see whether a process does its work."""

import argparse
import sys
import urllib.error
import urllib.request

PORT = 9_100
_TIMEOUT_S = 2.0


def run(options: argparse.Namespace) -> int:
    """0 where the process on this machine is ready, 1 and the reason where it is not."""
    url = f"http://127.0.0.1:{options.port}/{'livez' if options.live else 'readyz'}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace").strip()
    except OSError as error:
        reason = f"nobody answers at {url}: {error}"
    print(reason, file=sys.stderr)
    return 1
