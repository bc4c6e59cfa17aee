"""gpt-oss: windows, sinks, and compiled blocks."""

from dataclasses import replace

import pytest
import torch

from tests.unit.models.families import GPT_OSS as FAMILY
from torchtitan_like.models import resolve_args
from torchtitan_like.models.spec import fit_positions

GPT_OSS, build, perturb = FAMILY.spec, FAMILY.build, FAMILY.perturb
some_tokens = FAMILY.some_tokens


def test_windows_bound_the_flops_of_half_of_the_layers():
    """With full windows the 20b model needs 31.31 GFLOP for a token of a sequence of 8192."""
    args = resolve_args(GPT_OSS, "20b", {"sliding_window_size": 8192})
    assert GPT_OSS.flops_per_token(args, 8192) == pytest.approx(31.31e9, rel=1e-3)
    for seq_len in (64, 128):  # windows as long as the sequence
        short = replace(args, sliding_window_size=128)
        assert GPT_OSS.flops_per_token(short, seq_len) == GPT_OSS.flops_per_token(args, seq_len)


# ---- attention


def test_every_second_layer_has_a_window():
    """With one layer, tokens before the window do not affect a token; with two layers, they do."""
    for n_layers, sees in ((1, False), (2, True)):
        args, model = build({"n_layers": n_layers, "top_k": 8})
        perturb(model)
        tokens = some_tokens(args, batch=1, seq=20)
        changed = tokens.clone()
        changed[0, 3] += 1 - 2 * (changed[0, 3] == args.vocab_size - 1).long()
        before, after = model(tokens)[0], model(changed)[0]
        differs = (before != after).any(-1).tolist()
        assert differs[:3] == [False] * 3
        assert all(differs[3:11])  # tokens 3 to 10 see token 3 in a window of 8 tokens
        assert any(differs[11:]) == sees


@pytest.mark.parametrize("window", [4, 64])
def test_documents_do_not_affect_each_other(window):
    """Two documents in one sample have the same logits as in separate samples."""
    overrides = {"sliding_window_size": window, "attn_mask_type": "block_causal"}
    args, model = build(overrides, torch.float64)
    perturb(model)
    tokens = some_tokens(args, batch=1, seq=22)
    positions = torch.cat([torch.arange(13), torch.arange(9)])[None]
    together = model(tokens, None, positions)
    first, second = (model(part) for part in tokens.split([13, 9], dim=1))
    assert (together - torch.cat([first, second], dim=1)).abs().max() <= 1e-12


def test_a_high_sink_takes_all_attention():
    """Attention then adds only its output bias, for any earlier tokens."""
    args, model = build({"n_layers": 1, "top_k": 8})
    perturb(model)
    tokens = some_tokens(args, batch=1, seq=6)
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % args.vocab_size
    assert not torch.allclose(model(tokens)[0, -1], model(changed)[0, -1], rtol=1e-3)
    with torch.no_grad():
        model.layers["0"].attention.sinks.fill_(1e4)
    assert torch.equal(model(tokens)[0, -1], model(changed)[0, -1])


@pytest.mark.parametrize("num_queries", [20, 7])
def test_block_masks_equal_additive_masks(num_queries):
    from torchtitan_like.models.layers.kernels import additive_mask, block_mask

    positions = torch.cat([torch.arange(8), torch.arange(12)])[None, -num_queries:]
    for options in ({"window": 5}, {"has_sink": True}, {"window": 5, "has_sink": True}):
        expected = additive_mask(positions, torch.float32, 20, **options)[0, 0] == 0
        attends = block_mask(positions, torch.float32, 20, **options).mask_mod
        zero = torch.tensor(0)
        query, key = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
        for row, queries, keys in zip(expected, query, key, strict=True):
            pairs = zip(queries, keys, strict=True)
            assert [bool(attends(zero, zero, q, k)) for q, k in pairs] == row.tolist()
        assert expected[:, 0].all() or not options.get("has_sink")


def test_yarn_does_not_depend_on_the_length_of_the_tables():
    args, model = build()
    _, short = build({"max_seq_len": 16})
    assert fit_positions(args, 16).rope_factor == args.rope_factor == 32
    tokens = some_tokens(args, seq=16)
    assert torch.equal(model(tokens), short(tokens))
    _, plain = build({"rope_factor": 1.0})
    assert not torch.allclose(model(tokens), plain(tokens), rtol=1e-3)


# ---- torch.compile


def compile_blocks(model, backend):
    torch.compiler.reset()
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


@pytest.mark.parametrize("has_documents", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
def test_a_compiled_step_equals_an_eager_one(backend, has_documents):
    args, model = build({})
    tokens = some_tokens(args, seq=24)
    positions = torch.arange(24).remainder(10).expand_as(tokens) if has_documents else None

    def step():
        model.zero_grad()
        out = model(tokens, positions=positions)
        out.square().mean().backward()
        return [out, *(parameter.grad for parameter in model.parameters())]

    expected = step()
    compile_blocks(model, backend)
    for value, expected_value in zip(step(), expected, strict=True):
        assert (value - expected_value).norm() <= 1e-5 * expected_value.norm()


@pytest.mark.parametrize("has_documents", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_blocks_compile_for_other_devices_than_a_cpu(has_documents):
    """Tensors on `meta` take the paths of a GPU in half precision."""
    args = resolve_args(GPT_OSS, "debugmodel", {**FAMILY.sizes, "attn_type": "sdpa"})
    with torch.device("meta"):
        model = GPT_OSS.build(args).to(torch.bfloat16)
        tokens = torch.zeros(2, 24, dtype=torch.int64)
    compile_blocks(model, "aot_eager")
    out = model(tokens, positions=torch.zeros_like(tokens) if has_documents else None)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
