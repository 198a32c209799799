"""Counts lines and modules by top-level folder and by room: `python -m tools.mass`, with `--rooms` for every room.

Blank lines and docstrings count. The product is what an installed Tokenbus consists of."""

import argparse
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("worker", "router", "protocol", "gateway", "client", "cli", "replay", "conformance", "demo")
OTHERS = ("deploy", "bench", "tools", "tests")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", action="store_true", help="one row for every folder that holds modules")
    rooms = parser.parse_args().rooms
    for group, folders in (("product", PRODUCT), ("others", OTHERS)):
        total_lines = total_modules = 0
        for folder in folders:
            modules = sorted((ROOT / folder).rglob("*.py"))
            total_lines += _row(folder, modules)
            total_modules += len(modules)
            if rooms:
                for room in sorted({module.parent for module in modules}):
                    _row(f"  {room.relative_to(ROOT)}", sorted(room.glob("*.py")))
        print(f"{group:<44} {total_lines:>7,} lines {total_modules:>5} modules\n")


def _row(name: str, modules: list[Path]) -> int:
    lines = sum(len(module.read_text().splitlines()) for module in modules)
    print(f"{name:<44} {lines:>7,} lines {len(modules):>5} modules")
    return lines


if __name__ == "__main__":
    main()
