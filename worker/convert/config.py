"""The sizes of a model from its `config.json`, checked: anything that can't be converted exactly is refused."""

from pathlib import Path
from typing import Any

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_config
from tokenbus.worker.files.model_config import Size, TokenIds

CONVERTER = "llama.cpp's convert_hf_to_gguf.py"
_SCALINGS = ("default", "linear", "yarn", "llama3")


class Rope(msgspec.Struct, frozen=True):
    """The way positions become rotations: `rope_scaling` in older files, `rope_parameters` in newer ones."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: Size | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"

    @property
    def has_own_factors(self) -> bool:
        """Whether yarn is to use factors other than those that llama.cpp derives."""
        own = (self.mscale, self.mscale_all_dim, self.attention_factor, self.beta_fast, self.beta_slow, self.truncate)
        return any(one is not None for one in own)


class SafetensorsConfig(model_config.ModelSizes, frozen=True):
    """The fields of `config.json` from which a model is converted."""

    intermediate_size: Size = 0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    quantization_config: dict[str, Any] | None = None
    num_experts: Size = 0
    num_local_experts: Size = 0
    num_experts_per_tok: Size = 0
    moe_intermediate_size: Size = 0
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Size] = []
    shared_expert_intermediate_size: Size = 0
    partial_rotary_factor: float | None = None
    linear_conv_kernel_dim: Size = 0
    linear_key_head_dim: Size = 0
    linear_value_head_dim: Size = 0
    linear_num_key_heads: Size = 0
    linear_num_value_heads: Size = 0
    full_attention_interval: Size = 4
    layer_types: list[str] = []
    attn_output_gate: bool = True
    tie_word_embeddings: bool | None = None
    bos_token_id: TokenIds = None

    @property
    def expert_count(self) -> int:
        """The number of experts in a layer, which newer versions of transformers call local."""
        return self.num_experts or self.num_local_experts

    @property
    def rope(self) -> Rope:
        return self.rope_parameters or self.rope_scaling or Rope()

    @property
    def rope_base(self) -> float:
        return self.rope.rope_theta or self.rope_theta or 10_000.0

    @property
    def has_delta_nets(self) -> bool:
        return self.linear_num_value_heads > 0

    @property
    def rotary_size(self) -> int:
        """The number of a head's values that are rotated."""
        share = self.rope.partial_rotary_factor or self.partial_rotary_factor
        return int(self.head_size * (share or (0.25 if self.has_delta_nets else 1.0)))

    @property
    def context_length(self) -> int:
        """The number of tokens up to which the conversion is exact: llama.cpp attends to all tokens, so a window is the
        limit."""
        return min(self.max_position_embeddings, self.window or self.max_position_embeddings)


_MOST = {
    "num_hidden_layers": 4_096,
    "num_experts": 16_384,
    "num_local_experts": 16_384,
    "num_attention_heads": 65_536,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 24,
}
"""Numbers many times as large as any model has: the tensors of a larger one would be listed for a very long time."""


def read(path: Path | None, where: Path) -> SafetensorsConfig:
    """Raises ModelError if there is no such file, or if a conversion would be impossible or inexact."""
    if path is None:
        raise ModelError(f"{where}: there is no config.json beside the weights; fetch the whole repository")
    config = model_config.read_sizes(path, SafetensorsConfig)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        if getattr(config, name) < 1:
            raise ModelError(f"{path}: {name} must be at least 1, got {getattr(config, name)}; correct it")
    for name, most in _MOST.items():  # before anything is made for each of them
        if getattr(config, name) > most:
            raise ModelError(f"{path}: {name} must be at most {most:,}, got {getattr(config, name):,}; correct it")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "an unknown method")
        raise ModelError(f"{path}: the weights are quantized by {method}; fetch the unquantized ones, or a GGUF")
    _check_exact(config, path)
    return config


def _check_exact(config: SafetensorsConfig, path: Path) -> None:
    rope, heads = config.rope, config.num_attention_heads
    if config.hidden_act not in ("silu", "swish"):
        raise refused(path, f"hidden_act {config.hidden_act}")
    if rope.kind not in _SCALINGS:
        raise refused(path, f"rope scaling {rope.kind}")
    if rope.kind == "yarn" and rope.has_own_factors:
        raise refused(path, "yarn scaling with attention factors")
    if heads % config.kv_heads or config.head_size % 2 or config.head_size < 2:
        raise ModelError(
            f"{path}: {heads} heads of {config.head_size} over {config.kv_heads} make no model; correct it"
        )


def check_delta_nets(config: SafetensorsConfig, where: Path) -> None:
    """Raises ModelError for a model with gated delta nets that llama.cpp computes differently."""
    interval = config.full_attention_interval
    for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads"):
        if getattr(config, f"linear_{name}") < 1:
            raise ModelError(
                f"{where}: linear_{name} must be at least 1, got {getattr(config, f'linear_{name}')}; correct it"
            )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        heads = f"{config.linear_num_value_heads} linear value heads over {config.linear_num_key_heads} key heads"
        raise ModelError(f"{where}: {heads} make no model; correct it")
    if interval < 1:
        raise ModelError(f"{where}: full_attention_interval must be at least 1, got {interval}; correct it")
    kinds = [
        "full_attention" if not (n + 1) % interval else "linear_attention" for n in range(config.num_hidden_layers)
    ]
    if config.layer_types and config.layer_types != kinds:
        raise refused(where, f"layers that do not attend every {interval}th time")
    if config.linear_key_head_dim != config.linear_value_head_dim:
        raise refused(where, "linear value heads of another size than their key heads")
    if config.rope.kind != "default":
        raise refused(where, f"rope scaling {config.rope.kind} of a model with linear attention")
    if not config.attn_output_gate:
        raise refused(where, "attention without a gate")
    if config.rotary_size < 2 or config.rotary_size % 2:
        raise refused(where, f"rotations of {config.rotary_size} numbers of a head")


def refused(path: Path, what: str) -> ModelError:
    """Returns the error of a model that could not be converted exactly."""
    return ModelError(f"{path}: {what} is not converted here; use {CONVERTER} and name its output")
