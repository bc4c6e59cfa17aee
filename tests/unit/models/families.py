"""The model families at small sizes, and random sizes for comparisons with transformers."""

from __future__ import annotations

import random
from typing import Any

from tests.harness.family import Family

UNTIED = {"enable_weight_tying": False}
SIGMOID = {"score_func": "sigmoid", "route_norm": True}
DENSE = {"dim": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64}
HEADS = {**DENSE, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 96}
EXPERTS = {"num_experts": 8, "top_k": 2, "moe_inter_dim": 32}

LLAMA3 = Family("llama3", "debugmodel", {**DENSE, "multiple_of": 32}, factor=3)
QWEN3 = Family("qwen3", "debugmodel", HEADS, factor=3)
QWEN3_MOE = Family("qwen3", "debugmodel_moe", {**HEADS, **EXPERTS}, factor=3)
HF = Family("hf", "mistral", {**HEADS, "sliding_window_size": 16}, factor=3)
GPT_OSS = Family(
    "gpt_oss",
    "debugmodel",
    {
        **DENSE,
        **EXPERTS,
        "max_seq_len": 128,
        "n_kv_heads": 2,
        "head_dim": 16,
        "sliding_window_size": 8,
        "original_seq_len": 16,
    },
    redrawn={"*.router.*": 0.3, "*.sinks": 1.0, "*.bias": 1.0, "*.b[123]": 1.0},
    factor=5,
    hf_router="mlp.router",
    hf_options={"attn_implementation": "eager"},  # the only one with sinks on CPU
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "debugmodel",
    {
        **DENSE,
        **EXPERTS,
        "max_seq_len": 128,
        "inter_dim": 96,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "original_seq_len": 16,
        "load_balance": "none",
    },
    redrawn={"*.expert_bias": 0.1},
    factor=3,
)
LLAMA4 = Family(
    "llama4",
    "debugmodel",
    {
        **DENSE,
        "n_layers": 4,
        "n_kv_heads": 2,
        "multiple_of": 8,
        "max_seq_len": 128,
        "every_n_layers_nope": 2,
        "fixed_attn_block_size": 16,
        "use_qk_norm": True,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "rope_original_max_seq_len": 16,
    },
    factor=5,
    hf_router="feed_forward.router",
)
FAMILIES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "hf": HF,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "llama4": LLAMA4,
}


def random_sizes(name: str, seed: int) -> dict[str, Any]:
    """Return sizes of a family for a comparison with transformers; `deepseek_v2` has softmax scores."""
    score_func = {"deepseek_v3": "sigmoid", "deepseek_v2": "softmax"}.get(name)
    if score_func:
        return _deepseek_sizes(seed, score_func)
    choose = random.Random(seed).choice
    if name == "llama3":
        return {
            "n_layers": choose([1, 2, 3]),
            "n_kv_heads": choose([1, 2, 4, None]),
            "ffn_dim_multiplier": choose([None, 0.5]),
            "norm_eps": choose([1e-5, 1e-3]),
            "rope_scaling_factor": choose([1.0, 8.0]),
            "rope_original_max_seq_len": choose([16, 64]),
            "enable_weight_tying": choose([True, False]),
        }
    if name == "qwen3":
        return {
            "n_layers": choose([1, 2, 3]),
            "n_kv_heads": choose([1, 2, 4]),
            "head_dim": choose([8, 16, 32]),
            "norm_eps": choose([1e-6, 1e-3]),
            "enable_weight_tying": choose([True, False]),
        }
    if name == "qwen3_moe":
        num_experts = choose([2, 5, 8, 16])
        return {
            "n_layers": choose([1, 2, 3]),
            "n_kv_heads": choose([1, 2, 4]),
            "num_experts": num_experts,
            "top_k": choose([1, 2, num_experts]),
            "moe_inter_dim": choose([24, 32, 64]),  # transformers' experts need rows of 16 bytes
            "route_norm": choose([True, False]),
            "enable_weight_tying": choose([True, False]),
            "norm_eps": choose([1e-6, 1e-3]),
        }
    if name == "gpt_oss":
        num_experts = choose([4, 8, 16])
        return {
            "n_layers": choose([2, 3]),
            "n_heads": choose([4, 8]),
            "n_kv_heads": choose([1, 2, 4]),
            "head_dim": choose([8, 16, 20]),
            "sliding_window_size": choose([4, 8, 16, 64]),
            "norm_eps": choose([1e-5, 1e-3]),
            "num_experts": num_experts,
            "top_k": choose([1, 2, 4]),
            "moe_inter_dim": choose([24, 32]),
            "swiglu_limit": choose([1.0, 7.0]),
            "rope_factor": choose([1.0, 4.0, 32.0]),
            "original_seq_len": choose([8, 16, 64]),
            "rope_theta": choose([10000.0, 150000.0]),
            "enable_weight_tying": choose([False, False, True]),
        }
    assert name == "llama4"
    return {
        "n_layers": choose([3, 4]),
        "n_heads": choose([4, 8]),
        "n_kv_heads": choose([1, 2, 4, None]),
        "norm_eps": choose([1e-5, 1e-3]),
        "ffn_dim_multiplier": choose([None, 0.5]),
        "auto_scale_hidden_dim": choose([True, True, False]),
        "num_experts": choose([4, 8, 16]),
        "top_k": choose([1, 1, 2, 4]),
        "interleave_moe_layer_step": choose([1, 2, 3]),
        "every_n_layers_nope": choose([0, 2, 3, 4]),
        "fixed_attn_block_size": choose([8, 16, 48, 64]),
        "use_qk_norm": choose([False, True]),
        "attn_scale": choose([0.0, 0.1, 1.0]),
        "floor_scale": choose([4, 16, 64]),
        "rope_theta": choose([10000.0, 500000.0]),
        "rope_scaling_factor": choose([1.0, 8.0, 16.0]),
        "rope_high_freq_factor": choose([1.0, 4.0]),
        "enable_weight_tying": choose([False, False, True]),
    }


def _deepseek_sizes(seed: int, score_func: str) -> dict[str, Any]:
    choose = random.Random(f"{seed} {score_func}").choice
    groups, limited, top_k = choose([(1, 1, 1), (1, 1, 3), (4, 2, 4), (8, 2, 4), (2, 1, 2)])
    return {
        "n_layers": choose([2, 3]),
        "n_dense_layers": choose([0, 1]),
        "norm_eps": choose([1e-6, 1e-3]),
        "num_experts": choose([8, 16, 32]) * (2 if groups == 8 else 1),
        "num_shared_experts": choose([1, 2]),
        "num_expert_groups": groups,
        "num_limited_groups": limited,
        "top_k": top_k,
        "score_func": score_func,
        "route_norm": score_func == "sigmoid" and choose([True, True, False]),
        "route_scale": choose([1.0, 2.5]),
        "q_lora_rank": choose([0, 20]),
        "v_head_dim": choose([8, 16, 24]),
        "qk_rope_head_dim": choose([8, 16]),
        "rope_factor": choose([1.0, 4.0, 40.0]),
        "mscale": choose([1.0, 0.7]),
    }
