"""`python -m bench [NAME ...]`: runs the measurements, one after another; without names all of them."""

import argparse
import subprocess
import sys

QUESTIONS = {
    "sink_or_iterator": ("bench.sink_or_iterator",),
    "first_chunk": ("bench.first_chunk",),
    "front_cpu": ("bench.front_cpu",),
    "decode_1": ("bench.decode", "--streams", "1"),
    "decode_8": ("bench.decode", "--streams", "8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in QUESTIONS]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}: choose from {', '.join(QUESTIONS)}")
    for name in options.names or QUESTIONS:
        print(f"# {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *QUESTIONS[name]], check=False).returncode:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
