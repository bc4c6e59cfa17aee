"""DeepSeek-V3: the published sizes, and Hugging Face's logits, gradients, routing, and files."""

import random

import pytest
import torch

from tests.harness.family import Family
from torchtitan_like.inference.generation import Sampling, generate
from torchtitan_like.models import InitRule
from torchtitan_like.models.spec import fit_positions

SMALL = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "inter_dim": 96,
    "moe_inter_dim": 32,
    "vocab_size": 96,
    "max_seq_len": 128,
    "num_experts": 8,
    "top_k": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "original_seq_len": 16,
    "load_balance": "none",
}
SIGMOID = {"score_func": "sigmoid", "route_norm": True}


FAMILY = Family("deepseek_v3", "debugmodel", SMALL, redrawn={"*.expert_bias": 0.1}, factor=3)
DEEPSEEK, build, perturb = FAMILY.spec, FAMILY.build, FAMILY.perturb
some_tokens = FAMILY.some_tokens


# ---- sizes


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("16B", 15_706_484_224, 2_661_150_208, 18.105996288),
        ("moonlight", 15_960_108_544, 2_914_774_528, 18.872767488),
        ("671B", 671_026_404_352, 37_552_282_624, 281.158232064),
        ("236B", 235_741_434_880, 21_375_800_320, 185.50705152),
        ("debugmodel", 33_014_016, 28_098_816, 0.920421888),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The first three totals equal transformers' models of these sizes."""
    FAMILY.assert_counts(flavor, total, active, 4096, gflops)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        ({"n_dense_layers": 7}, "n_dense_layers = 7: expected 0 to 6; set n_dense_layers = 6"),
        ({"v_head_dim": 193}, "v_head_dim = 193: expected 1 to 192"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: expected an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0: expected a number above 0"),
        ({"rope_factor": 0.5}, "rope_factor = 0.5: expected at least 1; set rope_factor = 1"),
        ({"score_func": "relu"}, "score_func = 'relu': expected one of softmax, sigmoid"),
        ({"route_norm": True}, 'route_norm = True: expected False with score_func = "softmax"'),
        (
            {"num_expert_groups": 3},
            "num_expert_groups = 3: expected a divisor of num_experts = 8; set num_expert_groups = 2",
        ),
        (
            {"num_expert_groups": 3, "num_limited_groups": 3},
            "num_expert_groups = 3: expected a divisor of num_experts = 8; set num_expert_groups = 2",
        ),
        ({"num_expert_groups": 4}, "top_k = 3: expected at most 2, the experts in num_limited"),
        (
            SIGMOID | {"num_expert_groups": 2, "num_limited_groups": 1},
            "num_limited_groups = 1: expected top_k / 2 = 1.5",
        ),
        ({"num_mtp_layers": -1}, "num_mtp_layers = -1: expected at least 0"),
        ({"mtp_loss_weight": float("nan")}, "mtp_loss_weight = nan: expected at least 0"),
        ({"n_kv_heads": 4}, "n_kv_heads = 4: deepseek_v3 has no such argument"),
    ],
)
def test_the_error_names_a_wrong_size(overrides, expected):
    FAMILY.assert_a_wrong_size_is_named(overrides, expected)


def test_every_parameter_has_one_role_and_one_rule():
    FAMILY.assert_one_role_and_one_rule({}, {"q_lora_rank": 16}, {"num_mtp_layers": 2})


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("layers.4.attention.kv_norm.weight", InitRule("ones")),
        ("layers.4.attention.wkv_b.weight", InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.1.attention.wo.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.experts.w1", InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.1.moe.experts.w3", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.shared_experts.w1.weight", InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.1.moe.shared_experts.w2.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.router.gate.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.0.feed_forward.w1.weight", InitRule("trunc_normal", 0.02, 100.0)),
        ("output.weight", InitRule("trunc_normal", 1 / 16, 3.0)),
    ],
)
def test_rules_of_initial_weights(name, rule):
    FAMILY.assert_initial_rule(name, rule)


def test_yarn_does_not_depend_on_the_length_of_the_tables():
    args, model = build()
    _, short = build({"max_seq_len": 16})
    assert fit_positions(args, 16).rope_factor == args.rope_factor == 40
    tokens = some_tokens(args, seq=16)
    assert torch.equal(model(tokens), short(tokens))
    _, plain = build({"rope_factor": 1.0})
    assert not torch.allclose(model(tokens), plain(tokens), rtol=1e-3)


# ---- Hugging Face


def random_sizes(seed, score_func):
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


CELLS = [
    pytest.param(seed, score_func, marks=[pytest.mark.nightly] if seed >= num_in_ci else [])
    for score_func, num_in_ci, number in (("sigmoid", 8, 20), ("softmax", 2, 20))
    for seed in range(number)
]


@pytest.mark.parametrize(("seed", "score_func"), CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, tmp_path, seed, score_func):
    FAMILY.assert_equals_transformers(monkeypatch, tmp_path, random_sizes(seed, score_func))


def test_the_bias_changes_experts_but_not_weights_of_the_same_experts():
    """A bias that is equal for all experts has no effect at all."""
    args, model = build(SIGMOID)
    perturb(model)
    tokens = some_tokens(args)
    biased = model(tokens)
    bias = model.layers["1"].moe.expert_bias
    bias += 0.5
    assert torch.equal(model(tokens), biased)
    bias.zero_()
    assert not torch.allclose(model(tokens), biased, rtol=1e-3)


@pytest.mark.parametrize("overrides", [SIGMOID | {"q_lora_rank": 16}, {}], ids=["v3", "v2"])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, overrides):
    assets = repo_root / "tests/assets/tokenizer"
    FAMILY.assert_transformers_reads_an_export(tmp_path, assets, overrides)


def test_generates_text():
    _, model = build({"vocab_size": 64, **SIGMOID})
    continuation = generate(model, [1, 2, 3], num_tokens=9, sampling=Sampling(), context=128)
    ids = torch.tensor([[1, 2, 3, *continuation.ids]])
    with torch.no_grad():
        expected = [model(ids[:, :end])[0, -1].argmax().item() for end in range(3, 12)]
    assert continuation.ids == expected
