"""This package's Adam, AdamW and Lion: their formulas, their rounding, skips and resumes."""

from functools import partial

import numpy as np
import pytest
import torch

from torchtitan_like.config.sections_training import Optimizer
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.optim import optimizer as optimizers
from torchtitan_like.optim.elementwise import random_bits, round_stochastically
from torchtitan_like.util import compile as compile_module
from torchtitan_like.util.shards import local_positions
from torchtitan_like.util.splitmix import GOLDEN_GAMMA, scramble, tensor_key

SKIP, KEEP = torch.ones(()), torch.zeros(())


def build(named, *, shard_indices=local_positions, seed=0, **settings):
    context = optimizers.OptimizerContext(
        (), partial(MatrixOwners, group=None), shard_indices, torch.device("cpu"), seed, {}
    )
    return optimizers.build_optimizer(named.items(), Optimizer(**settings), context)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"wq.weight": (6, 5), "norm.weight": (7,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def set_gradients(named, step):
    generator = torch.Generator().manual_seed(step)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def flat(named):
    return torch.cat([p.detach().flatten() for p in named.values()])


def test_bfloat16_gradients_are_divided_in_float32():
    """The states show it: 1.0038 is 1 in bfloat16."""
    named = parameters(torch.bfloat16)
    optimizer = build(named, name="AdamW", bf16_rounding="kahan", state_dtype="float32")
    set_gradients(named, 0)
    (own,) = (part for part in optimizer._optimizers if hasattr(part, "gated_step"))
    own.grad_scale = torch.tensor(1.0038)
    optimizer.step(KEEP)
    for p in named.values():
        expected = (1 - 0.9) * p.grad.float() / torch.tensor(1.0038)
        torch.testing.assert_close(own.state[p]["exp_avg"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_own_adam_equals_torchs(name):
    own, expected = parameters(torch.float64), parameters(torch.float64)
    optimizer = build(own, name=name, state_dtype="float64", lr=0.01)
    reference = getattr(torch.optim, name)(
        expected.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(5):
        for named in (own, expected):
            set_gradients(named, step)
        optimizer.step(KEEP)
        reference.step()
    torch.testing.assert_close(flat(own), flat(expected), rtol=1e-12, atol=1e-12)


def test_lion_follows_its_paper():
    named = parameters(torch.float64)
    optimizer = build(named, name="Lion", lr=0.01, lion_beta1=0.8, lion_beta2=0.9)
    weight = {name: p.detach().clone() for name, p in named.items()}
    mean = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in range(4):
        set_gradients(named, step)
        optimizer.step(KEEP)
        for name, p in named.items():
            direction = (0.8 * mean[name] + 0.2 * p.grad).sign()
            weight[name] = weight[name] - 0.01 * (direction + 0.1 * weight[name])
            mean[name] = 0.9 * mean[name] + 0.1 * p.grad
            torch.testing.assert_close(p.detach(), weight[name], rtol=1e-12, atol=1e-12)
    assert optimizer.state_dict().keys() == {
        f"state.{name}.{key}" for name in named for key in ("step", "exp_avg")
    }


VARIANTS = [
    {"name": "Lion"},
    {"state_dtype": "bfloat16", "bf16_rounding": "stochastic"},
    {"bf16_rounding": "kahan"},
    {"name": "Lion", "state_dtype": "float32", "bf16_rounding": "stochastic"},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_skipped_step_keeps_all_bits(settings):
    named = parameters(torch.bfloat16)
    optimizer = build(named, **settings)
    set_gradients(named, 0)
    optimizer.step(KEEP)
    before = flat(named), {name: value.clone() for name, value in optimizer.state_dict().items()}
    for p in named.values():
        p.grad.fill_(torch.nan)
    optimizer.step(SKIP)
    assert torch.equal(flat(named), before[0])
    assert all(torch.equal(optimizer.state_dict()[name], v) for name, v in before[1].items())


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_saved_state_continues_the_same_run(settings):
    runs = []
    for resumes in (False, True):
        named = parameters(torch.bfloat16)
        optimizer = build(named, **settings)
        for step in range(6):
            if resumes and step == 3:
                state = {name: value.clone() for name, value in optimizer.state_dict().items()}
                optimizer = build(named, **settings)
                optimizer.load_state_dict(state)
            set_gradients(named, step)
            optimizer.step(KEEP)
        runs.append(flat(named))
    assert torch.equal(*runs)


@pytest.mark.parametrize(
    ("rounding", "expected", "tolerance"),
    # Near 1, bfloat16 numbers below are 2^-8 apart and an update is 2^-12, so that the nearest
    # number never changes. Of 4096 elements, stochastic rounding has a mean with a standard
    # deviation below 1e-3.
    [("nearest", 1.0, 0.0), ("stochastic", 1 - 256 * 2**-12, 4e-3), ("kahan", 1 - 256 * 2**-12, 4e-3)],
)  # fmt: skip
def test_small_updates_of_bfloat16_weights_are_kept(rounding, expected, tolerance):
    named = {"w": torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))}
    optimizer = build(named, name="Lion", lr=2**-12, weight_decay=0.0, bf16_rounding=rounding)
    for _ in range(256):
        named["w"].grad = torch.ones_like(named["w"])
        optimizer.step(KEEP)
    assert abs(named["w"].float().mean().item() - expected) <= tolerance


STOCHASTIC = {"state_dtype": "bfloat16", "bf16_rounding": "stochastic", "lr": 1e-3}


def train_rows(first, end, shard_indices, seed=3):
    """Return these rows of a weight after three updates with the gradients of the whole weight."""
    rows = torch.linspace(-1, 1, 48).view(8, 6).bfloat16()[first:end]
    named = {"w": torch.nn.Parameter(rows.clone())}
    optimizer = build(named, shard_indices=shard_indices, seed=seed, **STOCHASTIC)
    for step in range(3):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        named["w"].grad = gradient.bfloat16()[first:end]
        optimizer.step(KEEP)
    return named["w"].detach()


def test_stochastic_rounding_does_not_depend_on_shards():
    """Two shards of rows, each updated by itself, equal the whole parameter."""
    whole = train_rows(0, 8, local_positions)
    shards = [
        train_rows(first, end, lambda _, rows=(first, end): [torch.arange(*rows), torch.arange(6)])
        for first, end in ((0, 3), (3, 8))
    ]
    assert torch.equal(torch.cat(shards), whole)
    assert not torch.equal(train_rows(3, 8, local_positions), whole[3:])  # indices in the shard
    assert not torch.equal(train_rows(0, 8, local_positions, seed=4), whole)


def test_random_bits_are_those_of_splitmix():
    index = torch.arange(1000)
    key = tensor_key(5, "w.weight")
    bits = random_bits(key, torch.tensor(7.0), index)
    start = scramble(np.array([7], np.uint64) * GOLDEN_GAMMA + np.uint64(key % 2**64))
    expected = scramble(start + index.numpy().astype(np.uint64) * GOLDEN_GAMMA)
    assert bits.tolist() == (expected & np.uint64(0xFFFF)).tolist()


def test_stochastic_rounding_keeps_the_expectation_and_special_values():
    bits = torch.arange(2**16, dtype=torch.int32)
    for value in (1.0, 1.00123, -3.14159, 1e-30):
        rounded = round_stochastically(torch.full((2**16,), value), bits).double()
        assert rounded.mean().item() == pytest.approx(
            torch.tensor(value).double().item(), rel=1e-12
        )
        assert len(rounded.unique()) <= 2
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    rounded = round_stochastically(special, torch.full((4,), 0xFFFF, dtype=torch.int32))
    torch.testing.assert_close(rounded[:3].float(), special[:3], equal_nan=True)


def test_states_in_bfloat16_halve_the_memory():
    named = {"w": torch.nn.Parameter(torch.zeros(100, 100))}
    (line,) = build(named, state_dtype="bfloat16").describe()
    assert line.endswith("12.00 bytes per parameter (weight 4.00 + gradient 4.00 + state 4.00)")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.nightly),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"name": "Lion"}),
        (torch.float32, {"name": "AdamW", "state_dtype": "bfloat16"}),
        (torch.float32, {"name": "AdamW8bit", "adamw8bit_block_size": 64}),
        (torch.bfloat16, {"bf16_rounding": "kahan"}),
        (torch.bfloat16, {"bf16_rounding": "stochastic", "state_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_a_compiled_update_equals_the_plain_one(settings, dtype, device, monkeypatch):
    """Kernels round where operators do. Contracted products change the last bit of few numbers."""
    results = []
    for is_compiled in (False, True):
        if device == "cpu":
            monkeypatch.setattr(compile_module, "_are_on_gpu", lambda args, c=is_compiled: c)
        monkeypatch.setattr(compile_module, "_can_compile", lambda c=is_compiled: c)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        generator = torch.Generator().manual_seed(0)
        named = {
            f"layers.0.{name}.weight": torch.nn.Parameter(
                torch.randn(shape, generator=generator).to(device, dtype)
            )
            for name, shape in {"wq": (70, 64), "norm": (64,)}.items()
        }
        optimizer = build(named, lr=0.01, **settings)
        for step in range(3):
            for p in named.values():
                p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
            optimizer.clip_gradients(1.0)
            optimizer.step((SKIP if step == 1 else KEEP).to(device))
        assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == is_compiled
        results.append({**named, **optimizer.state_dict()})
    for name, expected in results[0].items():
        actual = results[1][name].detach()
        assert actual.dtype == expected.dtype
        limit = 2**-7 if expected.dtype in (torch.bfloat16, torch.uint8) else 1e-6
        difference = (actual.double() - expected.detach().double()).abs().max()
        assert difference <= limit * expected.abs().max().double(), name
