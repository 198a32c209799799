"""Says how much memory an ONNX model needs, from what its graph and the files beside it say: once before it is loaded,
and once with the graph. Needs no library."""

from typing import NamedTuple

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import (
    GQA_SCORE_BYTES,
    MAX_SCORE_BYTES,
    PADDING_TOKENS,
    SCORE_COPIES,
    ModelFacts,
)
from tokenbus.worker.engine.settings_resolution import AUTO
from tokenbus.worker.files.model_config import OnnxModelConfig

DEFAULT_INPUT = 512
"""The longest input of an encoder whose files don't say how long it may be."""
SCORED_ROWS = 64
"""Rows of logits that a run computes where the log probabilities of a prompt are wanted."""
_OWN_FILE_COPIES = 2
_OWN_FILE_LOADING_COPIES = 4
"""The copies in memory of weights in the graph's own file, once they are loaded and before: onnxruntime keeps what it
has read, and arranges weights for its kernels."""
_MAX_EMBED_TOKENS = 2_048
_UNKNOWN_HEADS = 16


class OnnxFacts(NamedTuple):
    """A model, as far as its files say."""

    config: OnnxModelConfig
    uses_gqa: bool
    generates: bool
    token_bytes: int
    """The size of a token's keys and values."""
    vocab_size: int
    on_cpu: bool

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values. A run of plain attention reads one copy and writes another."""
        return self.token_bytes * (1 if self.uses_gqa else 2)

    @property
    def trained_context(self) -> int:
        """The tokens that one sequence may have; 0 if the files don't say.

        A plain graph applies its window to columns, including padding, so a row must not be longer than the window."""
        trained, window = self.config.context_length or 0, self.config.sliding_window
        if self.uses_gqa or window is None:
            return trained
        return min(trained or window, window)

    @property
    def num_heads(self) -> int:
        return self.config.num_heads or _UNKNOWN_HEADS

    def padding_tokens(self, settings: EngineSettings) -> int:
        """Returns the most tokens of padding in a batch; 0 if rows have none."""
        if self.uses_gqa or not self.generates:
            return 0
        asked = settings.onnx.max_paddings
        return PADDING_TOKENS if asked == AUTO else asked

    def has_own_rows(self, settings: EngineSettings) -> bool:
        """Whether rows take memory only for the tokens that they hold, and no other replica uses it: not on a GPU, to
        whose memory graphs are bound."""
        return self.on_cpu and not settings.kv_pool_bytes

    def read(self, settings: EngineSettings, weight_bytes: int = 0) -> ModelFacts:
        """Returns the facts from which the memory of a replica is estimated."""
        generates, trained = self.generates, self.trained_context
        num_seqs = settings.max_num_seqs if settings.max_num_seqs > 0 else 16
        embeds = generates and settings.pooling != "none"
        return ModelFacts(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=self.bytes_per_token if generates else 0,
            trained_context=trained or (0 if generates else DEFAULT_INPUT),
            width=self.config.width or self.num_heads * 64,
            vocab_size=self.vocab_size,
            rows=num_seqs + (SCORED_ROWS if generates else 0),
            kv_tokens=self._pool_tokens(settings) if generates else 0,
            heads=self.num_heads,
            embed_tokens=embed_tokens(settings, trained) if embeds else 0,
            pools=not generates,
            copies_lanes=generates and self.has_own_rows(settings),
            padding_tokens=self.padding_tokens(settings),
            batch_tokens=settings.max_num_batched_tokens,
            score_copies=1 if self.uses_gqa else SCORE_COPIES,
            max_score_bytes=GQA_SCORE_BYTES if self.uses_gqa else MAX_SCORE_BYTES if generates else 0,
        )

    def _pool_tokens(self, settings: EngineSettings) -> int:
        """Returns the tokens of KV memory that are this replica's share of a pool; 0 without one."""
        limit = settings.kv_limit_bytes or settings.kv_pool_bytes
        return limit // self.bytes_per_token if settings.kv_pool_bytes else 0


def weight_bytes(own: int, beside: int) -> int:
    """Returns the memory of weights in the graph's own file and in files beside it."""
    return beside + _OWN_FILE_COPIES * own


def loading_bytes(own: int, beside: int) -> int:
    """Returns the same while they are loaded."""
    return beside + _OWN_FILE_LOADING_COPIES * own


def embed_tokens(settings: EngineSettings, context_length: int) -> int:
    """Returns the most tokens of an input that a generating model embeds."""
    return settings.max_embed_tokens or min(context_length or _MAX_EMBED_TOKENS, _MAX_EMBED_TOKENS)
