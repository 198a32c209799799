"""Settings of an engine process, as its frontend passes them on."""

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine shares its KV memory out when many want it."""

    overcommit: float = 1.0
    """How many times its blocks may be promised. Above 1 more sequences run at once, and one may have to be preempted:
    it goes on later, by computing again what it had."""
    priority_s: float = 1.0
    """Seconds of waiting that one step of priority is worth."""
    max_cached_blocks: int | None = None
    """Cached blocks that nobody uses and that may stay on the device; None for those of 256 tokens where there is
    host memory for the others, else for all."""


class OnnxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What only an ONNX engine has to know."""

    provider: str = "auto"
    """Where onnxruntime computes: `cpu`, `cuda`, or `auto`: cuda where there is a GPU that it can use."""
    device_id: int = 0
    """Which GPU."""
    device_memory_mib: int = 0
    """No more MiB of a GPU's memory than this for weights and work, the cache apart; 0: as much as there is."""
    min_free_mib: int = 256
    """No prompt is computed while fewer MiB than this are free on the device: it could take what a running stream
    needs. Then requests end in `insufficient_memory`. 0 looks at nothing."""
    max_paddings: int = -1
    """Columns without a token that one batch of a plain-attention graph may have; chosen by -1: 4,096."""
    pooling: str = "auto"
    """What of a text's tokens becomes its embedding: `mean`, `cls` (the first) or `last`. `auto`: what the model's
    files say; where they say nothing, `last` for a model that generates and `mean` for an encoder."""
    spin: bool = True
    """Threads wait for each other by spinning, which is quicker where each has a core for itself."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to load a model and how much of the machine to use for it. 0 means: choose."""

    model: str
    """A GGUF or ONNX file, a directory with one, or a name on the Hub."""
    files: dict[str, str] = {}
    """Where an earlier engine found its files: a restart looks for nothing anew, and so can't find another model."""
    engine: str = "auto"
    """`gguf`, `onnx`, or `sim`: a simulator, whose model is the name of a timing. `auto`: `onnx` for a file or folder
    of that kind, else `gguf`."""
    fingerprint: str = ""
    """What the fleet calls these weights; empty: a digest of the files. Workers of one model name must have the same:
    one name for the GGUF and the ONNX of a model makes them one fleet."""
    sim_speedup: float = 1.0
    """How many times faster than its timing says a simulator is."""
    sim_faults: str = ""
    """What a simulator does wrong and when: `crash@200,slow@50=3000,hang@900,lose@20` (worker/engine/sim/faults.py)."""
    context_length: int = 0
    """Tokens of one sequence; chosen: what the model was trained for, at most 8,192."""
    kv_tokens: int = 0
    """Tokens of KV memory for all sequences together; chosen: four contexts, at most 16,384 or one context."""
    kv_block_size: int = -1
    """Tokens of a block, the unit in which memory is counted and prefixes are shared; chosen by -1: 16."""
    max_num_seqs: int = -1
    """Sequences that run at the same time; chosen by -1: 16."""
    max_num_batched_tokens: int = 1_024
    """Tokens that one step may carry."""
    step_target_ms: float = 400.0
    """Prompts are computed in chunks that take about this long."""
    threads: int = 0
    """CPU threads; chosen: all cores that this process may use."""
    scheduler: SchedulerSettings = SchedulerSettings()
    onnx: OnnxSettings = OnnxSettings()
    gpu_layers: int = -1
    """Layers to put on a GPU where there is one; -1 is all."""
    ubatch_tokens: int = 512
    """Tokens that the device computes at once, of those of a step."""
    kv_layout: str = "auto"
    """`unified`: one memory for all sequences, which can share prefixes. `per-stream`: one of equal size for each; none
    is shared, and decoding many long ones is faster. `auto` is `unified`."""
    cache_type_k: str = "f16"
    """How keys are kept: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0."""
    cache_type_v: str = "f16"
    """How values are kept; the q types need flash attention."""
    flash_attention: str = "auto"
    """`auto`, `on` or `off`."""
    main_gpu: int = 0
    """The GPU for what is not split."""
    split_mode: str = "layer"
    """How several GPUs share the model: `none`, `layer` or `row`."""
    tensor_split: tuple[float, ...] = ()
    """Shares of the model for each GPU; none: by their free memory."""
    kv_limit_bytes: int = 0
    """No more of the device's memory than this for KV; 0: as much as the other settings say."""
    debug: bool = False
    """Whether an engine that comes to rest checks every block that is cached."""
    host_cache_mib: int = -1
    """MiB of host memory for prefixes that nobody uses; chosen by -1: 1,024, or an eighth of the machine's if that is
    less. 0 keeps what there is room for on the device, and no more."""
