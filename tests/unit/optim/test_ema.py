"""The average of the weights equals a plain loop and torch's, and skipped updates do not enter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchtitan_like.config.sections_training import EMA
from torchtitan_like.optim.ema import AveragedWeights

NUM_UPDATES = 30
KEEP, SKIP = torch.zeros(()), torch.ones(())


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (7, 5), "norm": (5,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


@torch.no_grad()
def change(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in named.values():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(weight.dtype))


def averaged(named, **settings):
    average = AveragedWeights(named.items(), EMA(enable=True, **settings))
    average.start()
    return average


def loop(history, decay, has_warmup):
    """Return the average of the weights of all updates in float64; history[0]: the first weights."""
    average = history[0]
    for n, weight in enumerate(history[1:], start=1):
        d = min(decay, (1 + n) / (10 + n)) if has_warmup else decay
        average = d * average + (1 - d) * weight
    return average


@pytest.mark.parametrize("has_warmup", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
def test_equals_a_loop_in_float64(dtype, tolerance, has_warmup):
    """The average of bfloat16 weights is kept in float32."""
    named = weights(dtype)
    average = averaged(named, decay=0.6, warmup=has_warmup)
    history = [named["matrix"].detach().double().numpy().copy()]
    for step in range(NUM_UPDATES):
        change(named, step)
        average.update(KEEP)
        history.append(named["matrix"].detach().double().numpy().copy())
    value = average.state_dict()["average.matrix"]
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(
        value.double().numpy(), loop(history, 0.6, has_warmup), rtol=0, atol=tolerance
    )


def test_equals_torchs_average_bit_for_bit():
    named = weights()
    module = torch.nn.ParameterDict(named)
    expected = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected.update_parameters(module)  # torch's first update copies the weights
    average = averaged(named, decay=0.9, warmup=False)
    for step in range(NUM_UPDATES):
        change(named, step)
        expected.update_parameters(module)
        average.update(KEEP)
    for name, value in expected.module.items():
        assert torch.equal(average.state_dict()[f"average.{name}"], value)


def test_skipped_updates_do_not_enter():
    """Neither the average nor the number of updates, on which the warm-up depends, changes."""
    named = weights()
    average = averaged(named)
    change(named, 0)
    average.update(KEEP)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    change(named, 1)
    average.update(SKIP)
    after = average.state_dict()
    assert after["num_updates"] == 1
    assert all(torch.equal(after[name], value) for name, value in before.items())
    average.update(KEEP)
    assert average.state_dict()["num_updates"] == 2
    assert not torch.equal(average.state_dict()["average.norm"], before["average.norm"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_their_bits_again_after_an_error(dtype):
    named = weights(dtype)
    average = averaged(named, decay=0.5)
    change(named, 0)
    average.update(KEEP)
    before = {name: weight.detach().clone() for name, weight in named.items()}
    with pytest.raises(RuntimeError), average.applied():
        value = average.state_dict()["average.matrix"]
        assert torch.equal(named["matrix"], value.to(dtype))
        assert not torch.equal(named["matrix"], before["matrix"])
        raise RuntimeError
    assert all(torch.equal(named[name], value) for name, value in before.items())


def test_a_loaded_state_continues():
    named = weights()
    average, resumed = averaged(named), averaged(named)
    for step in range(3):
        change(named, step)
        average.update(KEEP)
    resumed.load_state_dict({name: t.clone() for name, t in average.state_dict().items()})
    change(named, 3)
    average.update(KEEP)
    resumed.update(KEEP)
    for name, tensor in average.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor)


def test_the_state_takes_no_gradients():
    average = averaged(weights())
    assert not any(tensor.requires_grad for tensor in average.state_dict().values())
