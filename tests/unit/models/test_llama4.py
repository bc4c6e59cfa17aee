"""Llama 4: the published sizes, and Hugging Face's logits, gradients, routing, and files."""

import random
from dataclasses import replace

import pytest
import torch

from tests.harness.family import Family
from torchtitan_like.models import InitRule, resolve_args
from torchtitan_like.models.layers.kernels import additive_mask, block_mask
from torchtitan_like.models.spec import fit_positions

SMALL = {
    "dim": 64,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 96,
    "multiple_of": 8,
    "max_seq_len": 128,
    "every_n_layers_nope": 2,
    "fixed_attn_block_size": 16,
    "use_qk_norm": True,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_original_max_seq_len": 16,
}


FAMILY = Family("llama4", "debugmodel", SMALL, factor=5, hf_router="feed_forward.router")
LLAMA4, build, perturb = FAMILY.spec, FAMILY.build, FAMILY.perturb
some_tokens = FAMILY.some_tokens


# ---- sizes


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("debugmodel", 15_017_216, 6_759_680, 0.641392128),
        ("debugmodel_irope", 15_017_216, 6_759_680, 0.142007808),
        ("17bx16e", 107_769_861_120, 17_172_894_720, 193.46721792),
        ("17bx16e_irope", 107_769_861_120, 17_172_894_720, 139.10903808),
        ("17bx128e", 400_711_848_960, 17_184_691_200, 193.5379968),
        ("17bx128e_irope", 400_711_848_960, 17_184_691_200, 139.17981696),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The totals equal transformers' text models of these sizes."""
    FAMILY.assert_counts(flavor, total, active, 32768, gflops)


def test_chunks_bound_the_flops_of_three_of_four_layers():
    args = resolve_args(LLAMA4, "17bx16e_irope", {})
    plain = resolve_args(LLAMA4, "17bx16e", {})
    assert LLAMA4.flops_per_token(args, 8192) == LLAMA4.flops_per_token(plain, 8192)
    saved = LLAMA4.flops_per_token(plain, 16384) - LLAMA4.flops_per_token(args, 16384)
    assert saved == 6 * 36 * args.n_heads * 2 * args.head_dim * 8192


@pytest.mark.parametrize("flavor", ["17bx16e_irope", "17bx128e_irope"])
def test_layers_of_the_published_models(flavor):
    """Every fourth layer has no rotation; the experts of the second model are in every second layer."""
    args = resolve_args(LLAMA4, flavor, {})
    assert (args.head_dim, args.ffn_dim, args.moe_inter_dim) == (128, 16384, 8192)
    assert [i for i in range(48) if not args.is_rotated(i)] == list(range(3, 48, 4))
    first, step = (0, 1) if flavor == "17bx16e_irope" else (1, 2)
    assert [i for i in range(48) if args.has_experts(i)] == list(range(first, 48, step))
    assert args.use_qk_norm == (flavor == "17bx16e_irope")
    assert {args.chunk(i) for i in range(48) if args.is_rotated(i)} == {8192}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        ({"every_n_layers_nope": 1}, "every_n_layers_nope = 1: expected 0, or at least 2"),
        ({"fixed_attn_block_size": 0}, "fixed_attn_block_size = 0: expected a number above 0"),
        ({"interleave_moe_layer_step": 7}, "layer_step = 7: expected 1 to 6; set interleave"),
        ({"attn_type": "varlen"}, "attn_type = 'varlen': expected one of sdpa, flex"),
        ({"attn_mask_type": "full"}, "attn_mask_type = 'full': expected one of causal, block_"),
        ({"attn_scale": -1.0}, "attn_scale = -1.0: expected at least 0"),
        ({"ffn_dim_multiplier": 0.0}, "ffn_dim_multiplier = 0.0: expected a number above 0"),
        ({"rope_high_freq_factor": 0.5}, "rope_high_freq_factor = 0.5: expected at least"),
        ({"rope_theta": 1.0}, "rope_theta = 1.0: expected a number above 1"),
        ({"n_heads": 3}, "dim = 256: expected a multiple of 2 x n_heads = 6"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3: expected a divisor of n_heads = 16; set n_k"),
        ({"n_kv_heads": 0}, "n_kv_heads = 0: expected a number above 0; remove it"),
        ({"load_balance": "even"}, "load_balance = 'even': expected one of"),
    ],
)
def test_the_error_names_a_wrong_size(overrides, expected):
    FAMILY.assert_a_wrong_size_is_named(overrides, expected)


def test_every_parameter_has_one_role_and_one_rule():
    FAMILY.assert_one_role_and_one_rule({})


PLAIN = InitRule("trunc_normal", 0.02, 100.0)
RESIDUAL = InitRule("trunc_normal", 0.01, 200.0)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("layers.2.attention_norm.weight", InitRule("ones")),
        ("tok_embeddings.weight", InitRule("normal", 1.0)),
        ("layers.1.attention.wq.weight", PLAIN),
        ("layers.1.attention.wo.weight", RESIDUAL),
        ("layers.0.feed_forward.w1.weight", PLAIN),
        ("layers.1.moe.experts.w1", PLAIN),
        ("layers.1.moe.experts.w2", RESIDUAL),
        ("layers.1.moe.experts.w3", RESIDUAL),
        ("layers.1.moe.shared_experts.w1.weight", PLAIN),
        ("layers.1.moe.shared_experts.w3.weight", RESIDUAL),
        ("layers.1.moe.router.gate.weight", RESIDUAL),
        ("output.weight", InitRule("trunc_normal", 1 / 16, 3.0)),
    ],
)
def test_rules_of_initial_weights(name, rule):
    FAMILY.assert_initial_rule(name, rule)


# ---- attention


def test_a_chunk_does_not_attend_to_earlier_chunks():
    """Only layers without rotation mix chunks."""
    for n_layers, sees in ((1, False), (2, True)):
        overrides = {"n_layers": n_layers, "interleave_moe_layer_step": 1, "top_k": 8}
        args, model = build(overrides)
        perturb(model)
        tokens = some_tokens(args, batch=1, seq=40)
        changed = tokens.clone()
        changed[0, 3] = (changed[0, 3] + 1) % args.vocab_size
        differs = (model(tokens)[0] != model(changed)[0]).any(-1).tolist()
        assert differs[:3] == [False] * 3
        assert all(differs[3:16])
        assert any(differs[16:]) == sees


@pytest.mark.parametrize("num_queries", [20, 7])
def test_block_masks_equal_additive_masks(num_queries):
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None, -num_queries:]
    for options in ({"chunk": 6}, {"chunk": 6, "window": 4}, {"chunk": 30}):
        expected = additive_mask(positions, torch.float32, 20, **options)[0, 0] == 0
        attends = block_mask(positions, torch.float32, 20, **options).mask_mod
        zero = torch.tensor(0)
        query, key = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
        for row, queries, keys in zip(expected, query, key, strict=True):
            pairs = zip(queries, keys, strict=True)
            assert [bool(attends(zero, zero, q, k)) for q, k in pairs] == row.tolist()


def test_a_chunk_mask_is_causal_within_chunks_and_documents():
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    attends = additive_mask(positions, torch.float32, 20, chunk=6)[0, 0] == 0
    for query in range(20):
        start = max(6 * (query // 6), 8 if query >= 8 else 0)
        assert attends[query].nonzero().flatten().tolist() == list(range(start, query + 1))


@pytest.mark.parametrize("chunk", [6, 64])
def test_documents_do_not_affect_each_other(chunk):
    """The second document starts at a chunk border, as in a separate sample."""
    overrides = {"fixed_attn_block_size": chunk, "attn_mask_type": "block_causal"}
    args, model = build(overrides, torch.float64)
    perturb(model)
    tokens = some_tokens(args, batch=1, seq=21)
    positions = torch.cat([torch.arange(12), torch.arange(9)])[None]
    together = model(tokens, None, positions)
    first, second = (model(part) for part in tokens.split([12, 9], dim=1))
    assert (together - torch.cat([first, second], dim=1)).abs().max() <= 1e-12


def test_short_sequences_do_not_change_the_temperature():
    """Tables of another length compute the same function."""
    args, model = build()
    _, short = build({"max_seq_len": 7})
    assert fit_positions(args, 7).floor_scale == args.floor_scale == 8
    assert short.layers["1"].attention.attn_scale == 0.0
    tokens = some_tokens(args, seq=7)
    assert torch.equal(model(tokens), short(tokens))
    _, constant = build({"attn_scale": 0.0})
    perturb(model)
    perturb(constant)
    tokens = some_tokens(args, seq=30)
    differs = (model(tokens)[0] != constant(tokens)[0]).any(-1)
    assert not differs[:7].any() and differs[7:].all()


# ---- Hugging Face


def random_sizes(seed):
    choose = random.Random(seed).choice
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


CELLS = [pytest.param(seed, marks=[pytest.mark.nightly] if seed >= 2 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, tmp_path, seed):
    FAMILY.assert_equals_transformers(monkeypatch, tmp_path, random_sizes(seed))


@pytest.mark.parametrize("every_n_layers_nope", [0, 2])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, every_n_layers_nope):
    sizes = {"every_n_layers_nope": every_n_layers_nope}
    assets = repo_root / "tests/assets/tokenizer"
    FAMILY.assert_transformers_reads_an_export(tmp_path, assets, sizes)


def test_the_order_of_weights_and_experts_matters():
    """The weights of Llama 4 multiply the inputs of the experts, so that they are not linear."""
    args, model = build({"n_layers": 1, "interleave_moe_layer_step": 1})
    perturb(model)
    moe = model.layers["0"].moe
    x = torch.randn(1, 30, args.dim, generator=torch.Generator().manual_seed(3))
    routed = moe(x) - moe.shared_experts(x)
    ids = moe.router.gate(x).argmax(-1)
    weights = moe.router.gate(x).amax(-1, keepdim=True).sigmoid()
    for token, expert, weight, actual in zip(x[0], ids[0], weights[0], routed[0], strict=True):
        scaled = weight * token
        hidden = torch.nn.functional.silu(moe.experts.w1[expert] @ scaled)
        expected = moe.experts.w2[expert] @ (hidden * (moe.experts.w3[expert] @ scaled))
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert replace(args, top_k=2).moe_inter_dim < args.moe_inter_dim
