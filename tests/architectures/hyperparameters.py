"""The hyperparameters of a tiny model of each architecture: what all have in common, and where one differs.

Keys are those of a GGUF without the architecture's name before them. A key that an architecture does not read does no
harm, so that most need none of their own."""

from collections.abc import Mapping

Value = bool | int | float | str | list[int] | list[float] | list[bool]
Hyperparameters = Mapping[str, Value]

VOCABULARY = 384
CONTEXT = 1_024
WINDOW = 32
LAYERS = 4
_WIDTH, _HEADS, _KV_HEADS, _FEED_FORWARD = 128, 4, 2, 192
_HEAD = _WIDTH // _HEADS

COMMON: Hyperparameters = {
    "vocab_size": VOCABULARY,
    "context_length": CONTEXT,
    "embedding_length": _WIDTH,
    "features_length": _WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": _FEED_FORWARD,
    "leading_dense_block_count": 1,
    "use_parallel_residual": False,
    "logit_scale": 1.0,
    "full_attention_interval": 2,
    "residual_scale": 1.0,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
    "attention.max_alibi_bias": 8.0,
    "attention.clamp_kqv": 1.0,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64,
    "attention.relative_buckets_count": 8,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": 2,
    "attention.indexer.head_count": 8,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 4096,
    "attention.indexer.block_size": 4,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.local_blocks": 1,
    "rope.dimension_count": _HEAD,
    "rope.dimension_sections": [_HEAD // 8] * 4,
    "rope.freq_base": 10_000.0,
    "expert_gating_func": 2,
    "ssm.inner_size": 2 * _WIDTH,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "kda.head_dim": _HEAD,
    "kda.gate_lower_bound": -5.0,
    "wkv.head_size": _HEAD,
    "shortconv.l_cache": 3,
    "time_mix_extra_dim": 32,
    "time_decay_extra_dim": 32,
    "xielu.alpha_n": [1.0] * LAYERS,
    "xielu.alpha_p": [1.0] * LAYERS,
    "xielu.beta": [1.0] * LAYERS,
    "xielu.eps": [1e-7] * LAYERS,
}

EXPERTS: Hyperparameters = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": _FEED_FORWARD,
    "expert_shared_feed_forward_length": _FEED_FORWARD,
    "expert_latent_length": _FEED_FORWARD,
    "expert_weights_scale": 1.0,
    "expert_group_scale": 1.0,
    "experts_per_group": 1,
    "interleave_moe_layer_step": 2,
    "moe_every_n_layers": 2,
}

_LATENT: Hyperparameters = {
    "attention.head_count_kv": 1,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "expert_weights_norm": True,
}
"""Attention to compressed keys and values (MLA): of 64 numbers and the 32 that are rotated."""
_WINDOW_LIST: Hyperparameters = {"attention.sliding_window_pattern": [True, False] * (LAYERS // 2)}
_EVERY_OTHER = [_KV_HEADS, 0] * (LAYERS // 2)
_HYBRID: Hyperparameters = {"attention.head_count_kv": _EVERY_OTHER}
"""The layers without heads for keys and values are recurrent."""
_NO_HEADS: Hyperparameters = _HYBRID | {"attention.head_count": [_HEADS, 0] * (LAYERS // 2)}
_HYPER_CONNECTIONS: Hyperparameters = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
}
_ALL_HEADS: Hyperparameters = {"attention.head_count_kv": _HEADS}
_INDEXER: Hyperparameters = {"attention.indexer.head_count": 64, "attention.indexer.key_length": 128}
_LATENT_HYBRID: Hyperparameters = _LATENT | {"attention.head_count_kv": [1, 0] * (LAYERS // 2)}
_SHIFT: Hyperparameters = {"token_shift_count": 1}
_RWKV7: Hyperparameters = {
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 16,
    "attention.gate_lora_rank": 16,
}

_OWN: dict[str, Hyperparameters] = {
    "arwkv7": _RWKV7 | _SHIFT,
    "bailingmoe3": _LATENT_HYBRID,
    "chameleon": _ALL_HEADS,
    "deepseek2": _LATENT,
    "deepseek2-ocr": _ALL_HEADS,
    "deepseek32": _LATENT | _INDEXER,
    "deepseek4": _HYPER_CONNECTIONS
    | {
        "attention.head_count_kv": 1,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.output_group_count": 4,
        "attention.output_lora_rank": 16,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160_000.0,
        "rope.dimension_count": _HEAD // 2,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": [10.0] * LAYERS,
    },
    "dots1": _ALL_HEADS,
    "dots3note": _LATENT
    | _INDEXER
    | _WINDOW_LIST
    | {
        "attention.kv_lora_rank_swa": 64,
        "attention.key_length_swa": 96,
        "attention.value_length_swa": 64,
        "attention.key_length_mla_swa": 64,
        "attention.value_length_mla_swa": 32,
        "rope.freq_base_swa": 10_000.0,
        "attention.indexer.types": [0, 1] * (LAYERS // 2),
    },
    "gemma4": _WINDOW_LIST
    | {
        "embedding_length_per_layer_input": 32,
        "attention.shared_kv_layers": 0,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.key_length_swa": _HEAD,
        "attention.value_length_swa": _HEAD,
        "rope.freq_base_swa": 10_000.0,
    },
    "glm-dsa": _LATENT | _INDEXER,
    "glm5-next": _LATENT_HYBRID | _HYPER_CONNECTIONS | {"rope.dimension_count": 0, "attention.key_length": 64},
    "granite_swa": _WINDOW_LIST,
    "granitehybrid": _HYBRID,
    "hrm_text": {"block_count": 6, "hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
    "hy_v4": _LATENT
    | _INDEXER
    | _HYPER_CONNECTIONS
    | {
        "attention.indexer.types": [1, 0] * (LAYERS // 2),
        "swiglu_clamp_exp": 10.0,
    },
    "jamba": _HYBRID,
    "kimi-k3": _LATENT_HYBRID
    | {"attn_res.block_size": 12, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0},
    "kimi-linear": _LATENT_HYBRID,
    "lfm2": _HYBRID,
    "lfm2moe": _HYBRID,
    "maple": _WINDOW_LIST | {"swiglu_clamp_exp": 7.0},
    "mimo2": _WINDOW_LIST,
    "minicpm3": _ALL_HEADS,
    "mistral4": _LATENT,
    "nemotron_h": _HYBRID | {"feed_forward_length": [0, 0, _FEED_FORWARD, _FEED_FORWARD]},
    "nemotron_h_moe": _HYBRID | {"feed_forward_length": [0, 0, _FEED_FORWARD, _FEED_FORWARD]},
    "olmoe": _ALL_HEADS,
    "plamo2": _NO_HEADS | {"ssm.group_count": 0},
    "plm": _ALL_HEADS,
    "qwen4exp": _HYPER_CONNECTIONS,
    "rwkv6": _ALL_HEADS,
    "rwkv6qwen2": _SHIFT,
    "rwkv7": _RWKV7,
    "spark2_5": _WINDOW_LIST,
    "step35": _WINDOW_LIST,
}
"""What an architecture has otherwise."""


def of(architecture: str) -> Hyperparameters:
    """Returns the hyperparameters of a tiny model."""
    return COMMON | EXPERTS | _OWN.get(architecture, {})
