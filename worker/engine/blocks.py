"""Counts KV memory in blocks: what has been promised to sequences, and what they use of it.

    total_blocks
    |------------------------------------------------|
    |  used  |  promised, not used yet |     free     |

A sequence is only started when everything it may ever need can be promised, so that no running sequence can run out of
memory because of another.
"""


class BlockPool:
    """A fixed number of blocks of `block_size` tokens. All sizes are in tokens unless they say blocks."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        assert total_blocks > 0, total_blocks
        assert block_size > 0, block_size
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._promised: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._promised_blocks = 0
        self._used_blocks = 0

    def __repr__(self) -> str:
        return f"<BlockPool {self._used_blocks} used, {self._promised_blocks} promised of {self.total_blocks}>"

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self._promised_blocks

    @property
    def used_blocks(self) -> int:
        return self._used_blocks

    def can_ever_promise(self, num_tokens: int) -> bool:
        return self._blocks(num_tokens) <= self.total_blocks

    def can_promise(self, num_tokens: int) -> bool:
        return self._blocks(num_tokens) <= self.free_blocks

    def promise(self, seq_no: int, num_tokens: int) -> None:
        """Sets room for `num_tokens` aside for a sequence that has none yet."""
        assert seq_no not in self._promised, seq_no
        assert self.can_promise(num_tokens), (seq_no, num_tokens, self)
        self._promised[seq_no] = self._blocks(num_tokens)
        self._used[seq_no] = 0
        self._promised_blocks += self._promised[seq_no]

    def use(self, seq_no: int, num_tokens: int) -> None:
        """Notes that a sequence holds `num_tokens` now, never more than it was promised."""
        blocks = self._blocks(num_tokens)
        assert self._used[seq_no] <= blocks <= self._promised[seq_no], (seq_no, num_tokens, self._promised[seq_no])
        self._used_blocks += blocks - self._used[seq_no]
        self._used[seq_no] = blocks

    def release(self, seq_no: int) -> None:
        """Gives back everything that a sequence holds and was promised."""
        self._promised_blocks -= self._promised.pop(seq_no)
        self._used_blocks -= self._used.pop(seq_no)

    def check_integrity(self) -> None:
        assert self._promised.keys() == self._used.keys()
        assert self._promised_blocks == sum(self._promised.values()) <= self.total_blocks
        assert self._used_blocks == sum(self._used.values())
        assert all(0 <= self._used[seq_no] <= blocks for seq_no, blocks in self._promised.items())

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
