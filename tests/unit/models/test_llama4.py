"""Llama 4: layers with chunks, layers without rotation, and weighted inputs of experts."""

from dataclasses import replace

import pytest
import torch

from tests.unit.models.families import LLAMA4 as FAMILY
from torchtitan_like.models import resolve_args
from torchtitan_like.models.layers.kernels import additive_mask, block_mask
from torchtitan_like.models.spec import fit_positions

LLAMA4, build, perturb = FAMILY.spec, FAMILY.build, FAMILY.perturb
some_tokens = FAMILY.some_tokens


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
    difference = (model(tokens)[0] - constant(tokens)[0]).abs().amax(-1)
    # Some CPUs round a row of a product differently if other rows differ: 5e-7 here.
    assert difference[:7].max() < 2e-6 and difference[7:].min() > 1e-2


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
