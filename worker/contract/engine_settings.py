"""The settings of a replica, as the frontend passes them to the engine process."""

import msgspec

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
CHOICES = {
    "cache_type_k": _CACHE_TYPES,
    "cache_type_v": _CACHE_TYPES,
    "flash_attention": ("auto", "on", "off"),
    "split_mode": ("none", "layer", "row", "tensor"),
    "pooling": ("auto", "mean", "cls", "last", "none"),
}
"""The values of the settings that have a fixed set of them."""


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Decides who gets KV memory when there is not enough for all."""

    expected_tokens: int = 0
    """The expected tokens of an answer, for which there must be room before it starts; 0 learns it from recent answers.
    An answer may still use its `max_tokens`: then another may be preempted, and continue later. With a value above
    every `max_tokens`, none ever is."""
    priority_s: float = 1.0
    """The seconds of waiting that one step of priority is worth."""
    kept_share: float = 0.25
    """The share of cached prefixes that each tenant may ask to keep longest; all tenants together may keep half. 0
    turns this off."""
    max_kept_s: float = 3_600.0
    """The longest time for which a tenant may keep an unused prefix; longer times are cut to this."""
    min_prefix_tokens: int = -1
    """Prefixes of fewer tokens are not cached: neither on the device nor in host memory, nor announced to routers. 0
    caches any; so does -1, unless each takes a checkpoint and host memory has room for only a few."""
    no_speculative_prefill: bool = False
    """Leaves idle steps empty. Without it, they compute what the next turn of a conversation will begin with, where the
    chat template drops reasoning from earlier answers."""


class OnnxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for ONNX engines only."""

    provider: str = "auto"
    """Where onnxruntime computes: `cpu`, `cuda`, or `auto`, which is cuda where it finds a usable GPU."""
    device_id: int = 0
    """The number of the GPU."""
    device_memory_mib: int = 0
    """The MiB of a GPU's memory for weights and activations, besides the KV cache; 0 sets no limit."""
    min_free_mib: int = 256
    """The MiB that must be free on the device before a prompt is computed, since a prompt could take what a running
    stream needs. With less, requests end in `insufficient_memory`. 0 turns the check off."""
    max_paddings: int = -1
    """The most padding columns that a batch of a graph with a plain cache may have; -1 means 4,096."""
    spin: bool = True
    """Whether threads wait for each other by spinning, which is faster where each has a core to itself."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one replica. 0 means that the engine chooses."""

    model: str
    """A GGUF or ONNX file, a directory containing one or safetensors, or a name on the Hub."""
    files: dict[str, str] = {}
    """The files that an earlier engine found: a restart does not search again, so it can't find another model."""
    follow_links: bool = True
    """Whether files beside the weights may be links to anywhere. Those of a model that a message names may not: they
    could be any files of this machine."""
    quantize: str = ""
    """The type to which a model in safetensors is converted, such as `q8_0`; empty means `f16`, or
    `bf16` for a model in BF16 on a processor that multiplies it faster."""
    engine: str = "auto"
    """`gguf`, `onnx`, or `sim`, a simulator whose model is the name of a timing. `auto` is `onnx` for a file or folder
    of that kind, else `gguf`."""
    fingerprint: str = ""
    """The fleet's name for these weights; a digest of the files where it is empty. Workers of one model must share it:
    giving the GGUF and the ONNX of a model one name makes them one fleet."""
    sim_speedup: float = 1.0
    """The factor by which a simulator is faster than its timing."""
    sim_faults: str = ""
    """The faults to simulate: `crash@200,slow@50=3000,hang@900,lose@20,load@10000` (worker/engine/sim/runner.py)."""
    context_length: int = 0
    """The most tokens of one sequence; 0 chooses what the model was trained for, at most 262,144, as far as memory
    allows."""
    kv_tokens: int = 0
    """The tokens of KV memory for all sequences together; 0 chooses four contexts, at most 65,536 or one context, as
    far as memory allows. On a GPU it is one context per sequence."""
    kv_block_size: int = -1
    """The tokens of a block, the unit in which memory is counted and prefixes are shared; -1 means 16."""
    max_num_seqs: int = -1
    """The number of sequences that run at once; -1 means 16."""
    max_num_batched_tokens: int = 1_024
    """The most tokens in one step."""
    step_target_ms: float = 400.0
    """The target duration of a prompt chunk."""
    threads: int = 0
    """CPU threads; 0 means all cores that this process may use, within the CPU limit of its control groups."""
    scheduler: SchedulerSettings = SchedulerSettings()
    onnx: OnnxSettings = OnnxSettings()
    devices: tuple[str, ...] = ()
    """The devices on which to compute, by the engine's names for them: `CUDA0,CUDA1` or `none` for llama.cpp, `cuda:0`
    or `cpu` for ONNX. Empty leaves the choice to the engine."""
    gpu_layers: int = -1
    """The layers to put on a GPU where there is one; -1 means all that fit."""
    ubatch_tokens: int = 512
    """The tokens of a step that the device computes at once."""
    cache_type_k: str = "f16"
    """The data type of keys: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0."""
    cache_type_v: str = "f16"
    """The data type of values; the q types need flash attention."""
    flash_attention: str = "auto"
    """`auto`, `on` or `off`."""
    main_gpu: int = 0
    """The GPU that holds what is not split."""
    split_mode: str = "layer"
    """The way in which several GPUs share the model: `none`, `layer`, `row` or `tensor`."""
    tensor_split: tuple[float, ...] = ()
    """The share of the model for each GPU; empty means in proportion to their free memory."""
    pooling: str = "auto"
    """The pooling of a text's tokens into its embedding: `mean`, `cls` (the first) or `last`. `auto` follows the files;
    without that, `last` for a model that generates and `mean` for an encoder. With `none`, a model that generates makes
    no embeddings."""
    max_embed_tokens: int = 0
    """The most tokens of an input to embed, for a model that generates; 0 means 2,048, or the context if that is less.
    Its KV memory is separate from `kv_tokens`."""
    kv_limit_bytes: int = 0
    """A limit on the device's memory for KV; 0 adds none to the other settings."""
    kv_pool_bytes: int = 0
    """The KV memory that all replicas of the process share. A replica whose lanes can be lent may take all of it while
    the others don't need it; one with fixed memory stays within `kv_limit_bytes`. 0: there is no pool."""
    kv_reserved_bytes: int = 0
    """The fixed KV memory that the previous engine had from the pool; 0 if there was none."""
    memory_share: float = 1.0
    """The share of this machine's memory that workers may take, from which sizes are chosen. 0 means that another
    engine has already chosen the sizes: nothing is chosen or compared with free memory."""
    memory_parts: int = 1
    """The number of replicas of this size, including itself, to leave room for in its process."""
    memory_kept_bytes: int = 0
    """The memory to leave for models that the process loads later."""
    debug: bool = False
    """Whether an idle engine checks every cached block."""
    host_cache_mib: int = -1
    """The MiB of host memory for prefixes that no sequence uses; -1 means 1,024, or an eighth of the memory that the
    machine or the container has, if that is less. 0 keeps only what fits on the device."""
    host_cache_limit_bytes: int = 0
    """An upper limit on what -1 means above; 0 sets none."""
    keep_cache: str = ""
    """A folder in which these copies outlive the worker; empty: they end with it."""
    keep_cache_mib: int = 8_192
    """The most MiB of all files in that folder, which other workers may use too."""


def check_choices(settings: EngineSettings) -> None:
    """Raises ValueError for a value that no engine knows, before anything is loaded with it or estimated from it."""
    for name, known in CHOICES.items():
        value = getattr(settings, name)
        if value not in known:
            raise ValueError(f"--{name.replace('_', '-')} must be one of {', '.join(known)}, got {value!r}")
