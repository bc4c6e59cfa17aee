"""muP and CompleteP: the factors of each parameter, and what they leave as it is."""

import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch.nn import functional as F

from tests.unit.models.families import FAMILIES, LLAMA3, QWEN3, UNTIED
from torchtitan_like.config.sections_training import Optimizer
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.parametrization import find_problems, parametrize
from torchtitan_like.models.spec import Scale
from torchtitan_like.optim.groups import group_parameters
from torchtitan_like.optim.optimizer import build_adam


def parametrized(name, flavor, sizes, base):
    spec = get_spec(name)
    args = resolve_args(spec, flavor, sizes)
    base_args = resolve_args(spec, flavor, {**sizes, **base})
    assert find_problems(spec, args, base_args, base) == []
    return parametrize(spec, args, base_args), args


def build(spec, args, dtype=torch.float32):
    with torch.device("meta"):
        model = spec.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), 0, spec.scale)
    return model


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_at_the_sizes_of_the_base_all_numbers_are_the_standard_ones(family):
    args, expected = family.build()
    spec = parametrize(family.spec, args, args)
    model = build(spec, args)
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert spec.scale(name, p.ndim) == Scale()
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    ("name", "flavor", "sizes", "base", "parameter", "ndim", "scale"),
    [
        # Four times as wide: dim 256, 16 heads of 16 dimensions.
        ("llama3", "debugmodel", {}, {"dim": 64, "n_heads": 4}, parameter, ndim, scale)
        for parameter, ndim, scale in (
            ("tok_embeddings.weight", 2, (1, 1, 1 / 4)),
            ("layers.0.ffn_norm.weight", 1, (1, 1, 1 / 4)),
            ("layers.0.attention.wq.weight", 2, (1 / 2, 1 / 4, 1 / 4)),
            ("layers.5.attention.wo.weight", 2, (1 / 2, 1 / 4, 1 / 4)),
            # multiple_of = 256: 768 features, 256 in the base model
            ("layers.0.feed_forward.w2.weight", 2, (3**-0.5, 1 / 3, 1 / 4)),
            ("norm.weight", 1, (1, 1, 1 / 4)),
            ("output.weight", 2, (1 / 4, 1 / 4, 1)),
        )
    ]
    + [
        # The norm before a tied head has its multiplier.
        ("llama3", "debugmodel", {"enable_weight_tying": True}, {"dim": 64, "n_heads": 4}, *rest)
        for rest in (
            ("tok_embeddings.weight", 2, (1, 1, 1 / 4)),
            ("norm.weight", 1, (1 / 4, 1 / 4, 1)),
        )
    ]
    + [
        # Heads that are four times as wide: scores are divided by head_dim, not by its root.
        ("llama3", "debugmodel", {}, {"dim": 64}, "layers.0.attention.wq.weight", 2, (1 / 4, 1 / 8, 1 / 2)),
        ("llama3", "debugmodel", {}, {"dim": 64}, "layers.0.attention.wk.weight", 2, (1 / 2, 1 / 4, 1 / 4)),
        ("qwen3", "debugmodel", {}, {"dim": 64, "head_dim": 32}, "layers.0.attention.q_norm.weight", 1, (1 / 2, 1 / 2, 1 / 2)),
        ("deepseek_v3", "debugmodel", {}, {"dim": 64}, "layers.0.attention.wkv_b.weight", 2, (1, 1, 1 / 4)),
    ]
    + [
        # Experts of the same width: only the inputs of w1 and w3 have grown.
        ("qwen3", "debugmodel_moe", {}, {"dim": 64}, *rest)
        for rest in (
            ("layers.0.moe.router.gate.weight", 2, (1 / 4, 1 / 4, 1)),
            ("layers.0.moe.experts.w1", 3, (1 / 2, 1 / 4, 1 / 4)),
            ("layers.0.moe.experts.w2", 3, (1, 1, 1 / 4)),
        )
    ]
    + [
        # Three times as deep.
        ("gpt_oss", "debugmodel", {"n_layers": 6}, {"n_layers": 2, "dim": 256}, *rest)
        for rest in (
            ("layers.0.attention.wo.weight", 2, (1 / 3, 1 / 3, 1)),
            ("layers.0.attention.wo.bias", 1, (1 / 3, 1 / 3, 1)),
            ("layers.0.moe.experts.w2", 3, (1 / 3, 1 / 3, 1)),
            ("layers.0.moe.experts.b2", 2, (1 / 3, 1 / 3, 1)),
            ("layers.0.moe.experts.w1", 3, (1, 1, 1 / 3)),
            ("layers.0.attention.sinks", 1, (1, 1, 1 / 3)),
            ("tok_embeddings.weight", 2, (1, 1, 1)),
        )
    ],
)  # fmt: skip
def test_factors(name, flavor, sizes, base, parameter, ndim, scale):
    spec, _ = parametrized(name, flavor, sizes, base)
    assert spec.scale(parameter, ndim) == pytest.approx(scale)


def test_a_layer_starts_like_the_one_at_the_same_depth_of_the_base():
    spec, args = parametrized("llama3", "debugmodel", {"n_layers": 6}, {"dim": 256, "n_layers": 2})
    rules = dict(spec.init_table(args))
    base = dict(LLAMA3.spec.init_table(resolve_args(LLAMA3.spec, "debugmodel", {"n_layers": 2})))
    for layer, base_layer in enumerate((0, 0, 0, 1, 1, 1)):
        name = f"layers.{layer}.attention.wo.weight"
        assert rules[name] == base[f"layers.{base_layer}.attention.wo.weight"]
    assert not any(fnmatchcase("layers.6.attention.wo.weight", pattern) for pattern in rules)


def test_initial_outputs_keep_their_size():
    deviations = {}
    for width in (64, 256):
        spec, args = parametrized(
            "llama3",
            "debugmodel",
            {"dim": width, "n_heads": width // 16},
            {"dim": 64, "n_heads": 4},
        )
        weights = build(spec, args).state_dict()
        for name in ("layers.0.attention.wq.weight", "output.weight"):
            deviations[width, name] = weights[name].std().item()
    assert deviations[64, "layers.0.attention.wq.weight"] == pytest.approx(0.02, rel=0.02)
    assert deviations[256, "layers.0.attention.wq.weight"] == pytest.approx(0.01, rel=0.02)
    assert deviations[256, "output.weight"] == pytest.approx(
        deviations[64, "output.weight"] / 4, rel=0.02
    )


def test_a_multiplier_in_a_weight_equals_one_in_the_forward_pass():
    """Also with weight decay and an epsilon as large as the gradients."""
    factor, x = 1 / 8, torch.randn(16, 4, dtype=torch.float64)
    start = torch.randn(3, 4, dtype=torch.float64)
    outputs = []
    for std, multiplier in ((factor, 1.0), (1.0, factor)):
        weight = torch.nn.Parameter(start * std)
        scale = Scale(std, std, 1 / std)
        section = Optimizer(lr=0.1, weight_decay=0.5, eps=0.3)
        groups = group_parameters(
            [("output.weight", weight)], section, (), lambda name, ndim, scale=scale: scale
        )
        optimizer = build_adam(groups, section)
        for _ in range(5):
            optimizer.zero_grad()
            (multiplier * F.linear(x, weight)).sigmoid().sum().backward()
            optimizer.step()
        outputs.append(multiplier * F.linear(x, weight).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=0)


def test_groups_have_the_factors_of_their_parameters():
    section = Optimizer(lr=0.1, weight_decay=0.2, no_weight_decay=["b"])
    scales = {
        "a": Scale(9, 0.5, 0.25),
        "b": Scale(9, 0.5, 0.25),
        "c": Scale(7, 0.5, 0.25),
        "d": Scale(),
    }
    named = [(name, torch.nn.Parameter(torch.zeros(2))) for name in scales]
    groups = group_parameters(named, section, (), lambda name, ndim: scales[name])
    settings = [
        ([name for name, _ in group.members], group.lr, group.weight_decay, group.eps_factor)
        for group in groups
    ]
    assert settings == [(["a", "c"], 0.05, 0.4, 0.25), (["b"], 0.05, 0, 0.25), (["d"], 0.1, 0.2, 1)]


@pytest.mark.parametrize(
    ("family", "sizes", "base"),
    [
        (LLAMA3, UNTIED, {"dim": 32, "n_heads": 2}),
        (LLAMA3, {"enable_weight_tying": True}, {"dim": 32}),  # heads of 8 dimensions
        (QWEN3, {"enable_weight_tying": True}, {"dim": 16, "head_dim": 8, "n_layers": 1}),
        (FAMILIES["qwen3_moe"], UNTIED, {"dim": 16, "moe_inter_dim": 8, "n_layers": 1}),
        (FAMILIES["deepseek_v3"], {}, {"dim": 16, "kv_lora_rank": 8}),
        (FAMILIES["gpt_oss"], {}, {"dim": 16, "head_dim": 8}),
    ],
)
def test_transformers_computes_the_same_logits(family, sizes, base):
    """An export needs no multiplier: all of them are in the weights."""
    spec, args = parametrized(family.spec.name, family.flavor, {**family.sizes, **sizes}, base)
    model = build(spec, args).eval()
    assert args.enable_weight_tying == (model.norm.weight[0].item() != 1)
    tokens = family.some_tokens(args)
    with torch.no_grad():
        logits, expected = model(tokens), family.hf_model(args, model)(tokens).logits
    assert logits.std() > 0.01
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * logits.std().item())


def test_llama4_without_weights_of_its_queries_needs_equal_heads():
    family = FAMILIES["llama4"]
    args = resolve_args(family.spec, family.flavor, family.sizes)
    base = resolve_args(family.spec, family.flavor, {**family.sizes, "dim": 32})
    (problem,) = find_problems(family.spec, args, base, {"dim": 32})
    assert problem.startswith("heads of 8 dimensions, and 16 in the model")


def test_the_scale_of_the_queries_is_of_the_scores():
    spec, _ = parametrized("llama3", "debugmodel", {}, {"dim": 64})
    query, key = (spec.scale(f"layers.0.attention.w{each}.weight", 2) for each in "qk")
    assert query.std / key.std == math.sqrt(4 / 16)
