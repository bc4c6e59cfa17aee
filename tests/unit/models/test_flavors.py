"""Llama flavors have the published sizes."""

import math
from fnmatch import fnmatchcase

import pytest
import torch

from torchtitan_like.models import InitRule, get_spec, resolve_args

LLAMA = get_spec("llama3")


def rule_of(args, name):
    return next(rule for pattern, rule in LLAMA.init_table(args) if fnmatchcase(name, pattern))


@pytest.mark.parametrize(
    ("flavor", "parameters", "ffn_dim", "rope_factor"),
    [
        ("debugmodel", 6_163_712, 768, 8),
        ("1B", 1_235_814_400, 8192, 32),
        ("3B", 3_212_749_824, 8192, 32),
        ("8B", 8_030_261_248, 14336, 8),
        ("70B", 70_553_706_496, 28672, 8),
        ("405B", 405_853_388_800, 53248, 8),
        ("debugmodel_flex_attn", 6_163_712, 768, 8),
        ("debugmodel_varlen_attn", 6_163_712, 768, 8),
        ("8B_flex", 8_030_261_248, 14336, 8),
        ("8B_varlen", 8_030_261_248, 14336, 8),
    ],
)
def test_numbers_of_parameters(flavor, parameters, ffn_dim, rope_factor):
    args = resolve_args(LLAMA, flavor, {})
    with torch.device("meta"):
        model = LLAMA.build(args)
    assert LLAMA.num_params(args) == parameters
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (args.ffn_dim, args.rope_scaling_factor) == (ffn_dim, rope_factor)


def test_flops_per_token_equal_the_published_run():
    """8B at 8192 tokens needs 57.914 GFLOP. 7,031 tokens/s per H100 are 407.2 TFLOP/s (41.17 %)."""
    flops = LLAMA.flops_per_token(resolve_args(LLAMA, "8B", {}), 8192)
    assert flops == 6 * (8_030_261_248 - 128256 * 4096) + 6 * 32 * 32 * (2 * 128) * 8192
    assert round(flops / 1e9, 3) == 57.914
    assert round(flops * 7031 / 1e12, 1) == 407.2
    assert round(100 * flops * 7031 / 989e12, 2) == 41.17


def test_a_tied_output_has_the_flops_of_an_untied_one():
    sizes = {"enable_weight_tying": False}
    tied, untied = resolve_args(LLAMA, "1B", {}), resolve_args(LLAMA, "1B", sizes)
    assert LLAMA.num_params(untied) - LLAMA.num_params(tied) == 128256 * 2048
    assert LLAMA.flops_per_token(tied, 8192) == LLAMA.flops_per_token(untied, 8192)


@pytest.mark.parametrize(
    ("init_std", "expected"),
    [("fixed", 0.02), (0.006, 0.006), ("sqrt(1/(3h))", 0.00482), ("sqrt(2/(5h))", 0.00528)],
)
def test_init_std_formulas_at_width_14336(init_std, expected):
    args = resolve_args(LLAMA, "8B", {"dim": 14336, "init_std": init_std})
    assert args.linear_std == pytest.approx(expected, abs=5e-6)
    assert rule_of(args, "layers.3.attention.wq.weight").std == args.linear_std


@pytest.mark.parametrize(
    ("name", "depth_init", "rule"),
    [
        ("tok_embeddings.weight", True, InitRule("normal", 1.0)),
        ("norm.weight", True, InitRule("ones")),
        ("layers.4.ffn_norm.weight", True, InitRule("ones")),
        ("layers.4.attention.wk.weight", True, InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.4.feed_forward.w1.weight", True, InitRule("trunc_normal", 0.02, 100.0)),
        (
            "layers.4.attention.wo.weight",
            True,
            InitRule("trunc_normal", 0.02 / math.sqrt(10), 100 * math.sqrt(10)),
        ),
        (
            "layers.4.feed_forward.w3.weight",
            True,
            InitRule("trunc_normal", 0.02 / math.sqrt(10), 100 * math.sqrt(10)),
        ),
        (
            "layers.4.feed_forward.w2.weight",
            False,
            InitRule("trunc_normal", 0.02 / math.sqrt(12), 100 * math.sqrt(12)),
        ),
        ("output.weight", True, InitRule("trunc_normal", 1 / 16, 3.0)),
    ],
)
def test_rules_of_initial_weights(name, depth_init, rule):
    """Projections into the residual stream are scaled by 1 / sqrt(2 (l + 1)), or by 1 / sqrt(2 L).

    l is the layer index from 0. L is the number of layers.
    """
    actual = rule_of(resolve_args(LLAMA, "debugmodel", {"depth_init": depth_init}), name)
    assert actual.kind == rule.kind
    assert (actual.std, actual.bound) == pytest.approx((rule.std, rule.bound))
