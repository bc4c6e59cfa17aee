"""Every family: published sizes, initial weights, tables, transformers' numbers, and requirements."""

import copy
import math
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from tests.harness.hf_weights import to_external, to_native
from tests.unit.models.families import FAMILIES, LLAMA3, SIGMOID, UNTIED, random_sizes
from torchtitan_like.models import InitRule, get_spec, resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.models.layers import kernels
from torchtitan_like.models.layers.rotary import RotaryEmbedding

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


# ---- sizes


@pytest.mark.parametrize(
    ("name", "flavor", "total", "active", "seq_len", "gflops"),
    [
        ("llama3", "debugmodel", 6_163_712, None, 8192, None),
        ("llama3", "1B", 1_235_814_400, None, 8192, None),
        ("llama3", "3B", 3_212_749_824, None, 8192, None),
        ("llama3", "8B", 8_030_261_248, None, 8192, 57.91444992),
        ("llama3", "70B", 70_553_706_496, None, 8192, None),
        ("llama3", "405B", 405_853_388_800, None, 8192, None),
        ("llama3", "debugmodel_flex_attn", 6_163_712, None, 8192, None),
        ("llama3", "debugmodel_varlen_attn", 6_163_712, None, 8192, None),
        ("llama3", "8B_flex", 8_030_261_248, None, 8192, 57.91444992),
        ("llama3", "8B_varlen", 8_030_261_248, None, 8192, 57.91444992),
        ("qwen3", "debugmodel", 31_987_968, None, 4096, None),
        ("qwen3", "0.6B", 596_049_920, None, 4096, 6.394871808),
        ("qwen3", "1.7B", 1_720_574_976, None, 4096, None),
        ("qwen3", "4B", 4_022_468_096, None, 4096, None),
        ("qwen3", "8B", 8_190_735_360, None, 4096, None),
        ("qwen3", "14B", 14_768_307_200, None, 4096, None),
        ("qwen3", "32B", 32_762_123_264, None, 4096, None),
        ("qwen3", "30B-A3B", 30_532_122_624, 3_353_032_704, 4096, 27.914883072),
        ("qwen3", "235B-A22B", 235_093_634_560, 22_190_763_520, 4096, 167.26000128),
        ("qwen3", "debugmodel_moe", 315_758_848, 51_517_696, 4096, 1.111266816),
        ("qwen3", "debugmodel_moe_small", 2_299_264, 1_119_616, 4096, 0.030310656),
        ("gpt_oss", "debugmodel", 183_397_920, 147_912_224, 8192, 1.396491456),
        ("gpt_oss", "20b", 20_914_757_184, 4_187_440_704, 8192, 26.557179264),
        ("gpt_oss", "120b", 116_829_156_672, 5_711_982_912, 8192, 38.158100352),
        ("deepseek_v3", "16B", 15_706_484_224, 2_661_150_208, 4096, 18.105996288),
        ("deepseek_v3", "moonlight", 15_960_108_544, 2_914_774_528, 4096, 18.872767488),
        ("deepseek_v3", "671B", 671_026_404_352, 37_552_282_624, 4096, 281.158232064),
        ("deepseek_v3", "236B", 235_741_434_880, 21_375_800_320, 4096, 185.50705152),
        ("deepseek_v3", "debugmodel", 33_014_016, 28_098_816, 4096, 0.920421888),
        ("llama4", "debugmodel", 15_017_216, 6_759_680, 32768, 0.641392128),
        ("llama4", "debugmodel_irope", 15_017_216, 6_759_680, 32768, 0.142007808),
        ("llama4", "17bx16e", 107_769_861_120, 17_172_894_720, 32768, 193.46721792),
        ("llama4", "17bx16e_irope", 107_769_861_120, 17_172_894_720, 32768, 139.10903808),
        ("llama4", "17bx128e", 400_711_848_960, 17_184_691_200, 32768, 193.5379968),
        ("llama4", "17bx128e_irope", 400_711_848_960, 17_184_691_200, 32768, 139.17981696),
    ],
)
def test_numbers_of_parameters_and_flops(name, flavor, total, active, seq_len, gflops):
    """The totals equal the models' pages, transformers' models, or TorchTitan's debug models."""
    spec = get_spec(name)
    args = resolve_args(spec, flavor, {})
    with torch.device("meta"):
        model = spec.build(args)
    assert spec.num_params(args) == total == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    others = 0
    if experts:
        others = experts * (args.num_experts - args.top_k) // args.num_experts
    assert spec.num_active_params(args) == total - others == (active or total)
    if gflops:
        flops = spec.flops_per_token(args, seq_len)
        assert flops == pytest.approx(gflops * 1e9, rel=1e-12)


def test_flavors_have_the_published_settings():
    """The ones that no number of parameters shows."""
    llama, qwen = get_spec("llama3").flavors, get_spec("qwen3").flavors
    assert {name for name, args in llama.items() if args.rope_scaling_factor == 32} == {"1B", "3B"}
    assert {args.rope_scaling_factor for args in llama.values()} == {8, 32}
    dense = {name: args for name, args in qwen.items() if not args.num_experts}
    settings = {(args.head_dim, args.rope_theta, args.norm_eps) for args in dense.values()}
    assert settings == {(128, 1e6, 1e-6)}
    tied = {name for name, args in dense.items() if args.enable_weight_tying}
    assert tied == {"debugmodel", "0.6B", "1.7B", "4B"}


def test_flops_equal_the_published_run():
    """8B at 8192 tokens needs 57.914 GFLOP. 7,031 tokens/s per H100 are 407.2 TFLOP/s (41.17 %)."""
    flops = LLAMA3.spec.flops_per_token(resolve_args(LLAMA3.spec, "8B", {}), 8192)
    assert flops == 6 * (8_030_261_248 - 128256 * 4096) + 6 * 32 * 32 * (2 * 128) * 8192
    assert round(flops / 1e9, 3) == 57.914
    assert round(flops * 7031 / 1e12, 1) == 407.2
    assert round(100 * flops * 7031 / 989e12, 2) == 41.17


@EACH
def test_a_tied_output_has_the_flops_of_an_untied_one(family):
    sizes = (family.sizes | {"enable_weight_tying": tied} for tied in (True, False))
    tied, untied = (resolve_args(family.spec, family.flavor, each) for each in sizes)
    embedding = tied.vocab_size * tied.dim
    assert family.spec.num_params(untied) - family.spec.num_params(tied) == embedding
    assert family.spec.flops_per_token(tied, 64) == family.spec.flops_per_token(untied, 64)
    assert family.spec.tied(tied) == (("output.weight", "tok_embeddings.weight"),)
    assert family.spec.tied(untied) == ()


def test_sizes_need_no_torch():
    program = (
        "import sys; from torchtitan_like.models import get_spec\n"
        f"for name in {sorted({family.spec.name for family in FAMILIES.values()})}:\n"
        "    spec = get_spec(name); args = next(iter(spec.flavors.values()))\n"
        "    spec.num_params(args), spec.flops_per_token(args, 8192), spec.check(args)\n"
        "    spec.init_table(args), spec.hf_names(args), spec.hf_config(args)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False False"


@pytest.mark.parametrize(
    ("name", "flavor", "overrides", "expected"),
    [
        ("llama3", "8b", {}, "no flavor '8b' (did you mean \"8B\"?)"),
        (
            "llama3",
            "8B",
            {"n_layer": 2},
            'n_layer = 2: llama3 has no such argument (did you mean "n_layers"?)',
        ),
        ("llama3", "8B", {"n_layers": "2"}, "n_layers = '2': expected int, found str"),
        ("llama3", "8B", {"n_layers": True}, "n_layers = True: expected int, found bool"),
        ("llama3", "8B", {"n_layers": 2.0}, "n_layers = 2.0: expected int, found float"),
        ("llama3", "8B", {"depth_init": 1}, "depth_init = 1: expected bool, found int"),
        ("llama3", "8B", {"n_kv_heads": 1.5}, "n_kv_heads = 1.5: expected int or nothing, found f"),
        ("llama3", "8B", {"n_layers": 0}, "n_layers = 0: expected a number above 0"),
        ("llama3", "8B", {"n_layers": 10**9}, "n_layers = 1000000000: expected at most 10000"),
        (
            "llama3",
            "8B",
            {"vocab_size": 2**60},
            "vocab_size = 1152921504606846976: expected at most 2147483647",
        ),
        ("llama3", "8B", {"dim": 2**26}, " parameters: expected at most 1,000,000,000,000,000"),
        ("llama3", "8B", {"n_kv_heads": 5}, "n_kv_heads = 5: expected a divisor of n_heads = 32"),
        ("llama3", "8B", {"n_kv_heads": 0}, "n_kv_heads = 0: expected a number above 0"),
        ("llama3", "8B", {"dim": 4097}, "dim = 4097: expected a multiple of 2 x n_heads = 64"),
        (
            "llama3",
            "8B",
            {"init_std": "sqrt(h)"},
            "init_std = 'sqrt(h)': expected a number or one of fixed, sqrt(1/(3h))",
        ),
        ("llama3", "8B", {"init_std": 0}, "init_std = 0: expected a number above 0"),
        ("llama3", "8B", {"ffn_dim_multiplier": -1.0}, "multiplier = -1.0: expected a number abo"),
        (
            "llama3",
            "8B",
            {"rope_low_freq_factor": 9.0},
            "rope_high_freq_factor = 4.0: expected a number above rope_low_freq_factor = 9.0",
        ),
        ("qwen3", "0.6B", {"n_kv_heads": 5}, "n_kv_heads = 5: expected a divisor of n_heads = 16"),
        ("qwen3", "0.6B", {"n_kv_heads": 0}, "n_kv_heads = 0: expected a number above 0"),
        ("qwen3", "0.6B", {"head_dim": 63}, "head_dim = 63: expected an even number"),
        ("qwen3", "0.6B", {"attn_type": "ring"}, "'ring': expected one of sdpa, flex, varlen"),
        ("qwen3", "0.6B", {"init_std": 0.0}, "init_std = 0.0: expected a number above 0"),
        ("qwen3", "0.6B", {"multiple_of": 16}, "multiple_of = 16: qwen3 has no such argument"),
        ("qwen3", "30B-A3B", {"num_experts": -1}, "num_experts = -1: expected 0 for a dense model"),
        ("qwen3", "30B-A3B", {"top_k": 129}, "top_k = 129: expected 1 to 128; set top_k = 128"),
        ("qwen3", "30B-A3B", {"top_k": 0}, "top_k = 0: expected 1 to 128; set top_k = 1"),
        ("qwen3", "30B-A3B", {"moe_inter_dim": 0}, "moe_inter_dim = 0: expected a number above 0"),
        ("hf", "llama", {"architecture": "gemma"}, "= 'gemma': expected one of llama, mistral"),
        ("hf", "llama", {"rope_type": "longrope"}, "rope_type = 'longrope': expected one of defa"),
        ("hf", "llama", {"sliding_window_size": 8}, "window_size = 8: LlamaForCausalLM has no"),
        ("hf", "mistral", {"first_window_layer": 2}, "layer = 2: MistralForCausalLM has no"),
        ("hf", "qwen2", {"attention_bias": True}, "attention_bias = True: Qwen2ForCausalLM has no"),
        ("hf", "mistral", {"attn_type": "varlen"}, "attn_type = 'varlen': expected one of sdpa, f"),
        ("hf", "llama", {"attn_type": "flex"}, 'expected "sdpa" with attn_mask_type = "causal"'),
        ("hf", "llama", {"n_kv_heads": 5}, "n_kv_heads = 5: expected a divisor of n_heads = 32"),
        ("hf", "llama", {"rope_factor": 0.5}, "rope_factor = 0.5: expected at least 1"),
        (
            "hf",
            "llama",
            {"rope_type": "dynamic", "max_seq_len": 4096, "attn_mask_type": "block_causal"},
            'attn_mask_type = "block_causal": expected "causal" for sequences of more than',
        ),
        ("gpt_oss", "debugmodel", {"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        (
            "gpt_oss",
            "debugmodel",
            {"sliding_window_size": 0},
            "sliding_window_size = 0: expected a number above 0; remove it",
        ),
        ("gpt_oss", "debugmodel", {"attn_type": "varlen"}, "'varlen': expected one of sdpa, flex"),
        ("gpt_oss", "debugmodel", {"attn_mask_type": "full"}, "expected one of causal, block_"),
        (
            "gpt_oss",
            "debugmodel",
            {"rope_factor": 0.5},
            "rope_factor = 0.5: expected at least 1; set rope_factor = 1",
        ),
        ("gpt_oss", "debugmodel", {"head_dim": 7}, "rotated in pairs; set head_dim = 8"),
        (
            "gpt_oss",
            "debugmodel",
            {"n_kv_heads": 3},
            "n_kv_heads = 3: expected a divisor of n_heads = 64; set n_kv_heads = 2",
        ),
        ("gpt_oss", "debugmodel", {"load_balance": "even"}, "= 'even': expected one of"),
        ("deepseek_v3", "debugmodel", {"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        (
            "deepseek_v3",
            "debugmodel",
            {"n_dense_layers": 7},
            "n_dense_layers = 7: expected 0 to 6; set n_dense_layers = 6",
        ),
        ("deepseek_v3", "debugmodel", {"v_head_dim": 193}, "v_head_dim = 193: expected 1 to 192"),
        ("deepseek_v3", "debugmodel", {"qk_rope_head_dim": 7}, "dim = 7: expected an even number"),
        ("deepseek_v3", "debugmodel", {"kv_lora_rank": 0}, "rank = 0: expected a number above 0"),
        (
            "deepseek_v3",
            "debugmodel",
            {"rope_factor": 0.5},
            "rope_factor = 0.5: expected at least 1; set rope_factor = 1",
        ),
        (
            "deepseek_v3",
            "debugmodel",
            {"score_func": "relu"},
            "score_func = 'relu': expected one of softmax, sigmoid",
        ),
        (
            "deepseek_v3",
            "debugmodel",
            {"route_norm": True},
            'route_norm = True: expected False with score_func = "softmax"',
        ),
        (
            "deepseek_v3",
            "debugmodel",
            {"num_expert_groups": 3},
            "num_expert_groups = 3: expected a divisor of num_experts = 8; set num_expert_groups = 2",
        ),
        (
            "deepseek_v3",
            "debugmodel",
            {"num_expert_groups": 3, "num_limited_groups": 3},
            "num_expert_groups = 3: expected a divisor of num_experts = 8; set num_expert_groups = 2",
        ),
        (
            "deepseek_v3",
            "debugmodel",
            {"num_expert_groups": 4},
            "top_k = 3: expected at most 2, the experts in num_limited",
        ),
        (
            "deepseek_v3",
            "debugmodel",
            SIGMOID | {"num_expert_groups": 2, "num_limited_groups": 1},
            "num_limited_groups = 1: expected top_k / 2 = 1.5",
        ),
        ("deepseek_v3", "debugmodel", {"num_mtp_layers": -1}, "layers = -1: expected at least 0"),
        (
            "deepseek_v3",
            "debugmodel",
            {"mtp_loss_weight": float("nan")},
            "mtp_loss_weight = nan: expected at least 0",
        ),
        ("deepseek_v3", "debugmodel", {"n_kv_heads": 4}, "deepseek_v3 has no such argument"),
        ("llama4", "debugmodel", {"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        ("llama4", "debugmodel", {"every_n_layers_nope": 1}, "nope = 1: expected 0, or at least 2"),
        ("llama4", "debugmodel", {"fixed_attn_block_size": 0}, "size = 0: expected a number above"),
        (
            "llama4",
            "debugmodel",
            {"interleave_moe_layer_step": 7},
            "step = 7: expected 1 to 6; set",
        ),
        ("llama4", "debugmodel", {"attn_type": "varlen"}, "'varlen': expected one of sdpa, flex"),
        ("llama4", "debugmodel", {"attn_mask_type": "full"}, "expected one of causal, block_"),
        ("llama4", "debugmodel", {"attn_scale": -1.0}, "attn_scale = -1.0: expected at least 0"),
        (
            "llama4",
            "debugmodel",
            {"ffn_dim_multiplier": 0.0},
            "multiplier = 0.0: expected a number",
        ),
        ("llama4", "debugmodel", {"rope_high_freq_factor": 0.5}, "factor = 0.5: expected at least"),
        (
            "llama4",
            "debugmodel",
            {"rope_theta": 1.0},
            "rope_theta = 1.0: expected a number above 1",
        ),
        ("llama4", "debugmodel", {"n_heads": 3}, "256: expected a multiple of 2 x n_heads = 6"),
        (
            "llama4",
            "debugmodel",
            {"n_kv_heads": 3},
            "n_kv_heads = 3: expected a divisor of n_heads = 16; set n_k",
        ),
        ("llama4", "debugmodel", {"n_kv_heads": 0}, "= 0: expected a number above 0; remove it"),
        ("llama4", "debugmodel", {"load_balance": "even"}, "= 'even': expected one of"),
    ],
)
def test_the_error_names_a_wrong_size(name, flavor, overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(get_spec(name), flavor, overrides)
    assert expected in str(error.value)


# ---- roles and initial weights

BIASES = {
    "architecture": "llama",
    "sliding_window_size": 0,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize(
    "models",
    [
        # These families share a table of roles.
        [("llama3", {}), ("qwen3", {}), ("qwen3", UNTIED), ("qwen3_moe", {}), ("hf", BIASES)],
        [("gpt_oss", {})],
        [("deepseek_v3", {}), ("deepseek_v3", {"q_lora_rank": 16}), ("deepseek_v3", {"num_mtp_layers": 2})],
        [("llama4", {})],
    ],
    ids=["dense", "gpt_oss", "deepseek_v3", "llama4"],
)  # fmt: skip
def test_each_parameter_has_one_role_and_one_rule_and_each_pattern_a_parameter(models):
    """A pattern of a layer may have its parameter in another layer."""
    names, patterns = set(), set()
    for name, overrides in models:
        spec = FAMILIES[name].spec
        args, model = FAMILIES[name].build(overrides)
        for parameter, _ in model.named_parameters():
            assert sum(fnmatchcase(parameter, p) for p, _ in spec.sharding) == 1, parameter
            assert any(fnmatchcase(parameter, p) for p, _ in spec.init_table(args)), parameter
            names.add(_of_any_layer(parameter))
        patterns |= {_of_any_layer(p) for p, _ in (*spec.sharding, *spec.init_table(args))}
    for pattern in patterns:
        assert any(fnmatchcase(name, pattern) for name in names), pattern


def _of_any_layer(name):
    prefix, _, rest = name.removeprefix("layers.").partition(".")
    return f"layers.*.{rest}" if name.startswith("layers.") and prefix.isdecimal() else name


ONES = InitRule("ones")
PLAIN = InitRule("trunc_normal", 0.02, 100.0)
OUTPUT = InitRule("trunc_normal", 1 / 16, 3.0)
LAYER_1 = InitRule("trunc_normal", 0.01, 200.0)
LAYER_4 = InitRule("trunc_normal", 0.02 / math.sqrt(10), 100 * math.sqrt(10))


@pytest.mark.parametrize(
    ("name", "overrides", "parameter", "rule"),
    [
        ("llama3", {}, "tok_embeddings.weight", InitRule("normal", 1.0)),
        ("llama3", {}, "norm.weight", ONES),
        ("llama3", {}, "layers.4.ffn_norm.weight", ONES),
        ("llama3", {}, "layers.4.attention.wk.weight", PLAIN),
        ("llama3", {}, "layers.4.feed_forward.w1.weight", PLAIN),
        ("llama3", {}, "layers.4.attention.wo.weight", LAYER_4),
        ("llama3", {}, "layers.4.feed_forward.w3.weight", LAYER_4),
        (
            "llama3",
            {"depth_init": False},
            "layers.4.feed_forward.w2.weight",
            InitRule("trunc_normal", 0.02 / math.sqrt(12), 100 * math.sqrt(12)),
        ),
        ("llama3", {}, "output.weight", OUTPUT),
        ("qwen3", {}, "tok_embeddings.weight", OUTPUT),
        ("qwen3", UNTIED, "tok_embeddings.weight", InitRule("normal", 1.0)),
        ("qwen3", UNTIED, "output.weight", OUTPUT),
        ("qwen3", {}, "layers.4.attention.q_norm.weight", ONES),
        ("qwen3", {}, "norm.weight", ONES),
        ("qwen3", {}, "layers.4.attention.wk.weight", PLAIN),
        (
            "qwen3",
            {"init_std": 0.01},
            "layers.4.feed_forward.w1.weight",
            InitRule("trunc_normal", 0.01, 200.0),
        ),
        ("qwen3", {}, "layers.4.attention.wo.weight", LAYER_4),
        ("qwen3", {}, "layers.4.feed_forward.w3.weight", LAYER_4),
        (
            "qwen3",
            {"depth_init": False},
            "layers.4.feed_forward.w2.weight",
            InitRule("trunc_normal", 0.005, 400.0),
        ),
        ("qwen3_moe", {}, "layers.4.moe.experts.w1", PLAIN),
        ("qwen3_moe", {}, "layers.4.moe.experts.w3", LAYER_4),
        ("qwen3_moe", {}, "layers.4.moe.router.gate.weight", LAYER_4),
        ("gpt_oss", {}, "layers.2.attention_norm.weight", ONES),
        ("gpt_oss", {}, "tok_embeddings.weight", InitRule("normal", 1.0)),
        ("gpt_oss", {}, "layers.1.attention.wq.weight", LAYER_1),
        ("gpt_oss", {}, "layers.1.attention.wo.bias", LAYER_1),
        ("gpt_oss", {}, "layers.1.attention.sinks", LAYER_1),
        ("gpt_oss", {}, "layers.1.moe.experts.w1", LAYER_1),
        ("gpt_oss", {}, "layers.1.moe.experts.b2", LAYER_1),
        ("gpt_oss", {}, "layers.1.moe.router.gate.bias", LAYER_1),
        ("gpt_oss", {}, "output.weight", OUTPUT),
        ("deepseek_v3", {}, "layers.4.attention.kv_norm.weight", ONES),
        ("deepseek_v3", {}, "layers.4.attention.wkv_b.weight", PLAIN),
        ("deepseek_v3", {}, "layers.1.attention.wo.weight", LAYER_1),
        ("deepseek_v3", {}, "layers.1.moe.experts.w1", PLAIN),
        ("deepseek_v3", {}, "layers.1.moe.experts.w3", LAYER_1),
        ("deepseek_v3", {}, "layers.1.moe.shared_experts.w1.weight", PLAIN),
        ("deepseek_v3", {}, "layers.1.moe.shared_experts.w2.weight", LAYER_1),
        ("deepseek_v3", {}, "layers.1.moe.router.gate.weight", LAYER_1),
        ("deepseek_v3", {}, "layers.0.feed_forward.w1.weight", PLAIN),
        ("deepseek_v3", {"num_mtp_layers": 1}, "layers.6.eh_proj.weight", PLAIN),
        ("deepseek_v3", {}, "output.weight", OUTPUT),
        ("llama4", {}, "layers.2.attention_norm.weight", ONES),
        ("llama4", {}, "tok_embeddings.weight", InitRule("normal", 1.0)),
        ("llama4", {}, "layers.1.attention.wq.weight", PLAIN),
        ("llama4", {}, "layers.1.attention.wo.weight", LAYER_1),
        ("llama4", {}, "layers.0.feed_forward.w1.weight", PLAIN),
        ("llama4", {}, "layers.1.moe.experts.w1", PLAIN),
        ("llama4", {}, "layers.1.moe.experts.w2", LAYER_1),
        ("llama4", {}, "layers.1.moe.experts.w3", LAYER_1),
        ("llama4", {}, "layers.1.moe.shared_experts.w1.weight", PLAIN),
        ("llama4", {}, "layers.1.moe.shared_experts.w3.weight", LAYER_1),
        ("llama4", {}, "layers.1.moe.router.gate.weight", LAYER_1),
        ("llama4", {}, "output.weight", OUTPUT),
    ],
)
def test_rules_of_initial_weights(name, overrides, parameter, rule):
    """Projections into the residual stream are scaled by 1 / sqrt(2 (l + 1)), or by 1 / sqrt(2 L).

    l is the layer index from 0. L is the number of layers. The flavors are the debug models.
    """
    spec = FAMILIES[name].spec
    rules = spec.init_table(resolve_args(spec, FAMILIES[name].flavor, overrides))
    actual = next(rule for pattern, rule in rules if fnmatchcase(parameter, pattern))
    assert actual.kind == rule.kind
    assert (actual.std, actual.bound) == pytest.approx((rule.std, rule.bound))


@pytest.mark.parametrize(
    ("init_std", "expected"),
    [("fixed", 0.02), (0.006, 0.006), ("sqrt(1/(3h))", 0.00482), ("sqrt(2/(5h))", 0.00528)],
)
def test_init_std_formulas_at_width_14336(init_std, expected):
    args = resolve_args(LLAMA3.spec, "8B", {"dim": 14336, "init_std": init_std})
    assert args.linear_std == pytest.approx(expected, abs=5e-6)
    rules = LLAMA3.spec.init_table(args)
    name = "layers.3.attention.wq.weight"
    assert next(r for p, r in rules if fnmatchcase(name, p)).std == args.linear_std


# ---- names


BLOCK = [
    "attention.wk.weight",
    "attention.wo.weight",
    "attention.wq.weight",
    "attention.wv.weight",
    "attention_norm.weight",
    "feed_forward.w1.weight",
    "feed_forward.w2.weight",
    "feed_forward.w3.weight",
    "ffn_norm.weight",
]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("llama3", BLOCK),
        ("hf", BLOCK),
        ("qwen3", ["attention.k_norm.weight", "attention.q_norm.weight", *BLOCK]),
    ],
)
def test_module_names(name, block):
    _, model = FAMILIES[name].build(UNTIED)
    names = [name for name, _ in model.named_parameters()]
    layers = [f"layers.{i}.{each}" for i in range(3) for each in block]
    assert sorted(names) == [*layers, "norm.weight", "output.weight", "tok_embeddings.weight"]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", ["hf_names", "meta_names"])
@EACH
def test_tables_cover_every_tensor(family, format, tied):
    names = getattr(family.spec, format)
    if names is None:
        return
    args, model = family.build({"enable_weight_tying": tied})
    native = family.state(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in native.items()}
    table = links(names(args), shapes, family.spec.tied(args))
    external = to_external(table, native)
    restored = to_native(table, external, native)
    aliases = dict(family.spec.tied(args))
    for name, weight in native.items():
        assert name in aliases or torch.equal(restored[name], weight), name
    if format == "meta_names" and family.spec.name != "gpt_oss":
        assert external.keys() == native.keys() - aliases.keys()


# ---- Hugging Face


SCALED_ROPE = {"rope_original_max_seq_len": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "overrides", "seq"),
    [
        ("llama3", {"rope_scaling_factor": 1.0}, 48),
        ("llama3", {"n_kv_heads": 2, "rope_scaling_factor": 1.0}, 48),
        ("llama3", {"n_kv_heads": 1, "max_seq_len": 1024, **SCALED_ROPE}, 1024),
        ("llama3", {"n_kv_heads": 2, "max_seq_len": 8192, "n_layers": 1, **SCALED_ROPE}, 8192),
        ("llama3", {"enable_weight_tying": True, "norm_eps": 1e-3}, 48),
        ("qwen3", {}, 48),
        ("qwen3", {"n_kv_heads": 1, "norm_eps": 1e-3, **UNTIED}, 48),
        ("qwen3", {"head_dim": 8, "n_kv_heads": 4}, 48),
        ("qwen3", {"max_seq_len": 4096, "n_layers": 1}, 4096),
    ],
)
@torch.no_grad()
def test_logits_equal_transformers(name, overrides, seq):
    """At 8,192 tokens, a last-digit error of a rotary frequency would change logits by 1e-4."""
    family = FAMILIES[name]
    args, model = family.build(overrides)
    family.perturb(model)
    tokens = family.some_tokens(args, batch=1, seq=seq)
    logits, reference = model(tokens), family.hf_model(args, model).eval()(tokens).logits
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() <= 1e-5
    if getattr(args, "rope_scaling_factor", 1.0) != 1.0 and seq > 48:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.scaling = None
        model.init_buffers(torch.device("cpu"))
        assert (model(tokens) - reference).abs().max() > 1e-3, "expected the scaling to matter"


# How many of 20 cells run outside of nightly tests.
CELLS = {
    "llama3": 2,
    "qwen3": 2,
    "qwen3_moe": 8,
    "gpt_oss": 5,
    "deepseek_v3": 8,
    "deepseek_v2": 2,
    "llama4": 2,
}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[pytest.mark.nightly] if seed >= count else [])
        for name, count in CELLS.items()
        for seed in range(20)
    ],
)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, tmp_path, name, seed):
    family = FAMILIES[name.replace("v2", "v3")]
    family.assert_equals_transformers(monkeypatch, tmp_path, random_sizes(name, seed))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama3", {}),
        ("qwen3", {}),
        ("qwen3", UNTIED),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"enable_weight_tying": True}),
        ("gpt_oss", {}),
        ("deepseek_v3", SIGMOID | {"q_lora_rank": 16}),
        ("deepseek_v3", {}),
        ("llama4", {"every_n_layers_nope": 0}),
        ("llama4", {"every_n_layers_nope": 2}),
    ],
)
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, name, overrides):
    assets = repo_root / "tests/assets/tokenizer"
    FAMILIES[name].assert_transformers_reads_an_export(tmp_path, assets, overrides)


# ---- requirements of the framework


@EACH
def test_loss_equals_cross_entropy_and_all_parameters_get_gradients(family):
    args, model = family.build()
    family.perturb(model)
    tokens = family.some_tokens(args)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    loss = model(tokens, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@EACH
def test_attention_is_causal(family):
    """Layers without a window carry the change to all later tokens."""
    args, model = family.build()
    tokens = family.some_tokens(args, seq=32)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % args.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() == 0 and difference[20:].min() > 0


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "hf"])
def test_positions_separate_documents_only_with_block_causal(name, documents):
    """Positions restart rotations. With block_causal they also separate documents."""
    family = FAMILIES[name]
    args, model = family.build({"attn_mask_type": "block_causal" if documents else "causal"})
    family.perturb(model)
    tokens = family.some_tokens(args, seq=32)
    consecutive = torch.arange(32).expand(2, 32)
    torch.testing.assert_close(model(tokens, positions=consecutive), model(tokens))
    halves = model(tokens, positions=consecutive % 16)
    torch.testing.assert_close(halves[:, :16], model(tokens)[:, :16])
    assert not torch.equal(halves, model(tokens))
    assert torch.allclose(halves[:, 16:], model(tokens[:, 16:]), atol=1e-5) is documents


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
@EACH
def test_outputs_and_gradients_have_the_dtype_of_the_model(family, dtype, loss_dtype):
    args, model = family.build(dtype=dtype)
    tokens = family.some_tokens(args)
    assert model(tokens).dtype == dtype
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == loss_dtype
    assert all(p.grad.dtype == dtype for p in model.parameters())
    tables = {buffer.dtype for name, buffer in model.named_buffers() if "rotary" in name}
    assert tables == {torch.float32}


@EACH
def test_float64_agrees_with_float32(family):
    args, model = family.build()
    tokens = family.some_tokens(args)
    _, fp64_model = family.build(dtype=torch.float64)
    fp64_model.load_state_dict(model.state_dict())
    assert (model(tokens, tokens) / fp64_model(tokens, tokens) - 1).abs() < 1e-6


@EACH
def test_the_gradient_of_a_tied_weight_is_the_sum_of_two(family):
    args, model = family.build({"enable_weight_tying": True})
    assert model.output.weight is model.tok_embeddings.weight
    tokens = family.some_tokens(args)
    model(tokens, tokens).backward()
    _, untied = family.build(UNTIED)
    untied.load_state_dict(model.state_dict())
    untied(tokens, tokens).backward()
    expected = untied.tok_embeddings.weight.grad + untied.output.weight.grad
    torch.testing.assert_close(model.tok_embeddings.weight.grad, expected)


@EACH
def test_two_stages_equal_the_whole_model(family):
    args, model = family.build(UNTIED | {"n_layers": 3})
    tokens = family.some_tokens(args)
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["2"], last.layers["0"], last.layers["1"]
    assert torch.equal(last(first(tokens), tokens), model(tokens, tokens))
    layers = {name.split(".")[1] for name, _ in last.named_parameters() if "layers" in name}
    assert layers == {"2"}


# Block masks of one forward pass with plainly causal attention, and with document borders.
NUM_MASKS = {"hf": (1, 2), "gpt_oss": (1, 2), "llama4": (1, 2)}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_share_the_block_masks_of_a_forward_pass(name, documents, monkeypatch):
    """Flex attention also runs on CPU here, instead of the reference kernel."""
    calls = []
    create = flex_attention.create_block_mask
    monkeypatch.setattr(
        flex_attention,
        "create_block_mask",
        lambda *args, **options: calls.append(args) or create(*args, **options),
    )
    monkeypatch.setitem(kernels.KERNELS, "sdpa", kernels.KERNELS["flex"])
    family = FAMILIES[name]
    mask_type = "block_causal" if documents else "causal"
    args, model = family.build({"attn_mask_type": mask_type, "attn_type": "sdpa"})
    tokens = family.some_tokens(args, seq=32)
    positions = torch.arange(32).remainder(20).expand(tokens.shape) if documents else None
    with torch.no_grad():
        model(tokens, positions=positions)
    assert len(calls) == NUM_MASKS.get(name, (0, 1))[documents]


@pytest.mark.parametrize("name", ["hf", "gpt_oss", "llama4"])
def test_a_later_stage_masks_whole_sequences_with_sequence_parallelism(name):
    family = FAMILIES[name]
    _, stage = family.build(UNTIED)
    stage.tok_embeddings = None
    stage.sequence_shards = 2
    hidden = torch.zeros(2, 32, 64)  # this rank's half of the positions
    mask = stage.build_mask(hidden, None, hidden.dtype)
    assert mask.full is None and mask.local.shape[2] == 64


@EACH
def test_a_sequence_above_max_seq_len_is_refused(family):
    args, model = family.build()
    with pytest.raises(ValueError, match=f"longer than max_seq_len = {args.max_seq_len}"):
        model(family.some_tokens(args, seq=args.max_seq_len + 1))
