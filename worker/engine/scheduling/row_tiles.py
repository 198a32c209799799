"""Devices whose attention takes the tokens of a pass in tiles: what a pass costs there, and which tokens to compute
together.

llama.cpp's attention on CPUs computes passes of fewer than 64 tokens token by token, over the cells of each token's own
sequence. Larger passes are computed in tiles of 64, each over all cells that any of its tokens sees. That takes a third
of the time per token if a tile belongs to one prompt. But one token of another sequence makes the whole tile go through
that sequence's cells too (decision 0021)."""

from collections.abc import Sequence as Listing
from typing import NamedTuple

from tokenbus.worker.engine.scheduling.plan import ScheduledTokens

_PASS = 8.0
"""The cost of a pass besides that of its tokens: it reads all weights."""


class Pass(NamedTuple):
    """Tokens that are computed together."""

    parts: list[ScheduledTokens]
    padding: int = 0
    """The tokens that fill its tile up, whose results are not used."""


class RowTiles(NamedTuple):
    """The costs of attention on a device, in the unit of taking one token through the weights."""

    rows: int
    """The tokens of a tile, and the fewest tokens of a pass that is computed in tiles."""
    token_cost: float
    """The cost of one token's attention to one cell, outside of tiles."""
    tile_cost: float
    """The cost of a tile's attention to one cell."""

    def pads(self, num_tokens: int, num_cells: int) -> bool:
        """Whether this many tokens of one sequence, which then has `num_cells`, take longer than a whole tile does."""
        return _Size().plus(num_tokens, num_cells, self).padding(self) > 0

    def divide(self, batch: Listing[ScheduledTokens]) -> list[Pass]:
        """Returns the passes that compute a batch: each part is added to the last pass, unless a pass of its own costs
        less; or one pass, if that costs less in the end."""
        if len(batch) < self.rows and all(part.num_tokens == 1 for part in batch):  # the usual case, as it would end
            return [Pass([*batch])]
        passes: list[Pass] = []
        size = whole = _Size()
        cost = 0.0  # of all passes but the last
        for part in batch:
            whole = whole.plus(part.num_tokens, part.end, self)
            alone = _Size().plus(part.num_tokens, part.end, self)
            joined = size.plus(part.num_tokens, part.end, self)
            if passes and joined.cost(self) <= size.cost(self) + alone.cost(self):
                passes[-1].parts.append(part)
                size = joined
            else:
                cost += size.cost(self) if passes else 0.0
                passes.append(Pass([part]))
                size = alone
            passes[-1] = passes[-1]._replace(padding=size.padding(self))
        is_cheaper = cost + size.cost(self) <= whole.cost(self)
        return passes if is_cheaper else [Pass([*batch], whole.padding(self))]


class _Size(NamedTuple):
    """The size of a pass, as far as its cost depends on it."""

    num_tokens: int = 0
    pairs: int = 0
    """The pairs of a token and a cell that it sees."""
    full_cells: int = 0
    """The cells that each tile but the last goes through, added up."""
    last_cells: int = 0

    def plus(self, num_tokens: int, num_cells: int, tiles: RowTiles) -> "_Size":
        """Returns the size with so many tokens more, the last of which sees `num_cells`."""
        rows, total = tiles.rows, self.num_tokens + num_tokens
        pairs = self.pairs + num_tokens * num_cells
        filled = self.num_tokens % rows
        last_cells = self.last_cells + num_cells if filled else self.last_cells
        opened = (total - 1) // rows - (self.num_tokens - 1) // rows  # the first tile is the one after number -1
        if not opened:
            return _Size(total, pairs, self.full_cells, last_cells)
        return _Size(total, pairs, self.full_cells + last_cells + (opened - 1) * num_cells, num_cells)

    def cost(self, tiles: RowTiles) -> float:
        """Returns the cost of the pass, filled up or not."""
        if self.num_tokens < tiles.rows:
            return _PASS + min(self._by_token(tiles), self._filled(tiles))
        return _PASS + self.num_tokens + (self.full_cells + self.last_cells) * tiles.tile_cost

    def padding(self, tiles: RowTiles) -> int:
        """Returns the tokens by which to fill the pass up, as far as that costs less than leaving it as it is."""
        is_short = self.num_tokens < tiles.rows
        return tiles.rows - self.num_tokens if is_short and self._filled(tiles) < self._by_token(tiles) else 0

    def _by_token(self, tiles: RowTiles) -> float:
        return self.num_tokens + self.pairs * tiles.token_cost

    def _filled(self, tiles: RowTiles) -> float:
        return tiles.rows + self.last_cells * tiles.tile_cost
