"""Lays out rows as aligned columns, as plain text that a pipe gets in full width."""

from collections.abc import Collection, Sequence

from rich.cells import cell_len


def text_of(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns a line for each row. The columns whose indexes are in `right` are aligned to the right."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths, right) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> str:
    pads = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
    cells = [pad + cell if at in right else cell + pad for at, (cell, pad) in enumerate(zip(row, pads, strict=True))]
    return "  ".join(cells).rstrip()
