"""Settings of an engine process, as its front passes them on."""

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to load a model and how much of the machine to use for it. 0 means: choose."""

    model: str
    """Path of a GGUF file."""
    engine: str = "gguf"
    context_length: int = 0
    """Tokens of one sequence; chosen: what the model was trained for, at most 8,192."""
    kv_tokens: int = 0
    """Tokens of KV memory for all sequences together; chosen: four contexts, at most 16,384 or one context."""
    kv_block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1_024
    """Tokens that one step may carry."""
    step_target_ms: float = 150.0
    """Prompts are computed in chunks that take about this long."""
    threads: int = 0
    """CPU threads; chosen: all cores that this process may use."""
    gpu_layers: int = -1
    """Layers to put on a GPU where there is one; -1 is all."""
