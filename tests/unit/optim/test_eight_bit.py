"""AdamW8bit equals torchao's on whole rows, and its states do not depend on the layout."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from torchtitan_like.config.sections_training import Optimizer
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.optim import eight_bit
from torchtitan_like.optim.optimizer import OptimizerContext, build_optimizer
from torchtitan_like.util.shards import local_positions

pytest.importorskip("torchao")

KEEP, SKIP = torch.zeros(()), torch.ones(())


def parameter(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def set_gradient(p, seed):
    generator = torch.Generator().manual_seed(seed)
    p.grad = torch.randn(p.shape, generator=generator).mul_(0.1).to(p.dtype)


def build(p, **settings):
    context = OptimizerContext(
        (), partial(MatrixOwners, group=None), local_positions, torch.device("cpu"), 0, {}
    )
    section = Optimizer(**{"name": "AdamW8bit", "lr": 1e-2, "beta2": 0.95, **settings})
    return build_optimizer([("w", p)], section, context)


def torchaos(p):
    from torchao.optim import AdamW8bit

    return AdamW8bit([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_states_equal_torchaos(dtype):
    """Both round in different orders, which may move a code to its neighbor."""
    p, expected = (parameter(24, 512, dtype=dtype) for _ in range(2))
    optimizer, reference = build(p), torchaos(expected)
    for step in range(4):
        for each in (p, expected):
            set_gradient(each, step)
        optimizer.step(KEEP)
        with patch.object(torch, "compile", lambda function, **_: function):
            reference.step()
        limit = 1e-5 if dtype == torch.float32 else 2**-8 * expected.abs().max()
        assert ((p - expected).abs() <= limit).float().mean() > 0.999
    states = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        stored = reference.state[expected][name]
        codes = states[f"state.w.{name}_codes"].int()
        assert (codes == stored.codes).float().mean() > 0.99
        assert (codes - stored.codes.int()).abs().max() <= 1
        scales = states[f"state.w.{name}_scales"]
        torch.testing.assert_close(scales.flatten(), stored.scale, rtol=1e-5, atol=0)


def test_states_are_plain_tensors_of_a_byte_and_a_scale_per_block():
    p = parameter(16, 512)
    states = build(p).state_dict()
    shapes = {name: (type(t), t.dtype, tuple(t.shape)) for name, t in states.items()}
    codes, scales = (torch.Tensor, torch.uint8, (16, 512)), (torch.Tensor, torch.float32, (16, 2))
    assert shapes == {
        "state.w.step": (torch.Tensor, torch.float32, ()),
        "state.w.exp_avg_codes": codes,
        "state.w.exp_avg_scales": scales,
        "state.w.exp_avg_sq_codes": codes,
        "state.w.exp_avg_sq_scales": scales,
    }


@pytest.mark.parametrize("shape", [(4096,), (7, 512), (16, 300)])
def test_other_weights_have_the_states_of_adamw(shape):
    """Vectors, small matrices, and rows that are not a multiple of a block."""
    p, expected = parameter(*shape), parameter(*shape)
    optimizer = build(p)
    reference = torch.optim.AdamW([expected], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    assert set(optimizer.state_dict()) == {"state.w.step", "state.w.exp_avg", "state.w.exp_avg_sq"}
    for step in range(3):
        for each in (p, expected):
            set_gradient(each, step)
        optimizer.step(KEEP)
        reference.step()
    torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [0.1, float("nan"), float("inf")])
def test_a_skipped_update_changes_no_bit(value):
    p = parameter(16, 256)
    optimizer = build(p)
    set_gradient(p, 0)
    optimizer.step(KEEP)
    tensors = {"weight": p.detach(), **optimizer.state_dict()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    p.grad.fill_(value)
    optimizer.step(SKIP)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    p.grad.fill_(0.1)
    optimizer.step(KEEP)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_rows_of_a_shard_have_the_states_of_the_whole_matrix():
    """The blocks of a rank's rows or columns are blocks of the whole matrix."""
    whole = parameter(32, 1024)
    optimizer = build(whole)
    set_gradient(whole, 1)
    optimizer.step(KEEP)
    for slices, blocks in (
        ((slice(8, 24), slice(None)), (slice(8, 24), slice(None))),
        ((slice(None), slice(512, 1024)), (slice(None), slice(2, 4))),
    ):
        shard = parameter(32, 1024)
        gradient = whole.grad[slices].clone()
        shard = torch.nn.Parameter(shard.detach()[slices].clone())
        shard.grad = gradient
        of_shard = build(shard)
        of_shard.step(KEEP)
        assert torch.equal(shard, whole[slices])
        for name, state in of_shard.state_dict().items():
            if state.ndim:
                of_whole = optimizer.state_dict()[name]
                assert torch.equal(state, of_whole[blocks if "scales" in name else slices])


def test_torchaos_own_states_depend_on_the_number_of_ranks():
    """Why this package divides rows into blocks, and not the shards of ranks (docs/guides)."""
    from torchao.optim.subclass_8bit import OptimState8bit

    kinds = {}
    for num_ranks in (1, 2, 3):
        shard = parameter(24 // num_ranks, 384)
        shard.grad = torch.zeros_like(shard)
        optimizer = torchaos(shard)
        with patch.object(torch, "compile", lambda function, **_: function):
            optimizer.step()
        kinds[num_ranks] = isinstance(optimizer.state[shard]["exp_avg"], OptimState8bit)
    assert kinds == {1: True, 2: True, 3: False}


def test_chunks_do_not_change_the_codes(monkeypatch):
    """Large weights are coded in chunks, which bound the temporary memory."""
    states = []
    for chunk in (eight_bit.CHUNK, 1000):
        monkeypatch.setattr(eight_bit, "CHUNK", chunk)
        p = parameter(24, 512)
        optimizer = build(p)
        set_gradient(p, 0)
        optimizer.step(KEEP)
        states.append(optimizer.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_an_empty_shard_has_states():
    p = torch.nn.Parameter(torch.zeros(0, 256))
    with patch.object(eight_bit, "MIN_ELEMENTS", 0):
        optimizer = build(p)
        p.grad = torch.zeros_like(p)
        optimizer.step(KEEP)
    assert optimizer.state_dict()["state.w.exp_avg_codes"].shape == (0, 256)


def dynamic_map(is_signed):
    """Return the values of the codes (arXiv:2110.02861, figure 2): exponents, and linear fractions."""
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        num_fractions = 2 ** (exponent + (6 if is_signed else 7))
        bounds = np.linspace(0.1, 1, num_fractions + 1)
        positive = 10.0**exponent * (bounds[:-1] + bounds[1:]) / 2
        values += [*positive, *(-positive if is_signed else ())]
    return sorted(values)


@pytest.mark.parametrize(("name", "is_signed"), [("exp_avg", True), ("exp_avg_sq", False)])
def test_the_tables_of_codes_are_the_ones_of_stored_states(name, is_signed):
    """A checkpoint stores codes without their tables: another table would change their values."""
    table = eight_bit._build_coder(256, torch.device("cpu")).tables[name]
    assert len(table) == 256
    np.testing.assert_allclose(table.numpy(), dynamic_map(is_signed), rtol=1e-6)
