"""Qwen3 with experts: the published sizes and Hugging Face's numbers, gradients, and files."""

import random

import pytest

from tests.harness.family import Family
from tests.unit.models.test_qwen3 import SMALL, UNTIED

EXPERTS = {"num_experts": 8, "top_k": 2, "moe_inter_dim": 32}
FAMILY = Family("qwen3", "debugmodel_moe", {**SMALL, **EXPERTS, **UNTIED}, factor=3)


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("30B-A3B", 30_532_122_624, 3_353_032_704, 27.914883072),
        ("235B-A22B", 235_093_634_560, 22_190_763_520, 167.26000128),
        ("debugmodel_moe", 315_758_848, 51_517_696, 1.111266816),
        ("debugmodel_moe_small", 2_299_264, 1_119_616, 0.030310656),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The two totals equal transformers' models of these sizes."""
    FAMILY.assert_counts(flavor, total, active, 4096, gflops)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"num_experts": -1}, "num_experts = -1: expected 0 for a dense model"),
        ({"top_k": 9, "num_experts": 8}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        ({"top_k": 0}, "top_k = 0: expected 1 to 64; set top_k = 1"),
        ({"moe_inter_dim": 0}, "moe_inter_dim = 0: expected a number above 0"),
    ],
)
def test_the_error_names_a_wrong_size(overrides, expected):
    FAMILY.assert_a_wrong_size_is_named(overrides, expected)


def random_sizes(seed):
    choose = random.Random(seed).choice
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


CELLS = [pytest.param(seed, marks=[pytest.mark.nightly] if seed >= 8 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, tmp_path, seed):
    FAMILY.assert_equals_transformers(monkeypatch, tmp_path, random_sizes(seed))


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, tied):
    assets = repo_root / "tests/assets/tokenizer"
    sizes = {"enable_weight_tying": tied}
    hf_model = FAMILY.assert_transformers_reads_an_export(tmp_path, assets, sizes)
    args, _ = FAMILY.build()
    assert hf_model.config.num_experts_per_tok == args.top_k
    assert hf_model.config.norm_topk_prob is args.route_norm
