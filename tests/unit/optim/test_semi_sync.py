"""LocalSGD and DiLoCo: schedule, update and state."""

from __future__ import annotations

import pytest
import torch

from torchtitan_like.config.sections_run import FaultTolerance
from torchtitan_like.optim.semi_sync import DiLoCo, LocalSGD, build_semi_sync


def section(**settings: object) -> FaultTolerance:
    return FaultTolerance.model_validate(
        {"enable": True, "group_size": 2, "semi_sync_method": "diloco", **settings}
    )


def parameters() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    names = ("tok_embeddings.weight", "layers.0.wq.weight", "layers.1.wq.weight", "output.weight")
    return [(name, torch.randn(4, 3, generator=generator)) for name in names]


def train(named: list[tuple[str, torch.Tensor]], step: int) -> None:
    """Change the weights as an inner optimizer does."""
    for number, (_, parameter) in enumerate(named):
        parameter.add_(0.01 * torch.sin(parameter + step + number))


def test_local_sgd_replaces_weights_by_the_mean() -> None:
    one, other = parameters(), parameters()
    train(other, 1)
    methods = [LocalSGD([p for _, p in named], 5) for named in (one, other)]
    assert [step for step in range(1, 12) if methods[0].is_due(step)] == [5, 10]
    values = [method.values(5) for method in methods]
    means = [(a + b) / 2 for a, b in zip(*values, strict=True)]
    for method in methods:
        method.apply(5, means)
    assert all(
        torch.equal(a, mean) and torch.equal(b, mean)
        for (_, a), (_, b), mean in zip(one, other, means, strict=True)
    )


def test_diloco_takes_the_steps_of_torchs_sgd() -> None:
    """torch.optim.SGD with Nesterov momentum, on the weights of the last synchronization."""
    named = parameters()
    method = build_semi_sync(named, section(sync_steps=2), [["tok_embeddings", "layers", "output"]])
    expected = [parameter.clone().requires_grad_() for _, parameter in named]
    outer = torch.optim.SGD(expected, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 9):
        train(named, step)
        if not method.is_due(step):
            continue
        values = method.values(step)
        for parameter, value in zip(expected, values, strict=True):
            parameter.grad = value.clone()
        outer.step()
        method.apply(step, values)
        for (_, parameter), reference in zip(named, expected, strict=True):
            torch.testing.assert_close(parameter, reference.detach(), rtol=1e-6, atol=1e-7)


def test_alpha_mixes_local_weights_into_the_global_ones() -> None:
    runs = []
    for alpha in (0.0, 0.25):
        named = parameters()
        settings = section(sync_steps=1, fragment_update_alpha=alpha)
        method = build_semi_sync(named, settings, [["tok_embeddings", "layers", "output"]])
        train(named, 1)
        local = [parameter.clone() for _, parameter in named]
        method.apply(1, method.values(1))
        runs.append([parameter for _, parameter in named])
    for start, mixed, own in zip(*runs, local, strict=True):
        torch.testing.assert_close(mixed, start + 0.25 * (own - start))


def test_fragments_take_turns_and_are_sent_before_they_are_applied() -> None:
    named = parameters()
    fragments = [["tok_embeddings", "layers.0"], ["layers.1", "output"]]
    settings = section(sync_steps=6, num_fragments=2, fragment_sync_delay=1)
    method = build_semi_sync(named, settings, fragments)
    assert isinstance(method, DiLoCo)
    sent, changed = {}, {}
    for step in range(1, 13):
        train(named, step)
        if method.is_due(step):
            means = method.values(step)
            sent[step] = len(means)
        if method.applies(step):
            before = [parameter.clone() for _, parameter in named]
            method.apply(step, means)
            pairs = zip(named, before, strict=True)
            changed[step] = [name for (name, now), old in pairs if not torch.equal(now, old)]
    first, second = (
        ["tok_embeddings.weight", "layers.0.wq.weight"],
        ["layers.1.wq.weight", "output.weight"],
    )
    assert sent == dict.fromkeys((2, 5, 8, 11), 2)
    assert changed == {3: first, 6: second, 9: first, 12: second}


@pytest.mark.parametrize("num_steps", [2, 4])
def test_diloco_continues_from_its_state(num_steps: int) -> None:
    fragments = [["tok_embeddings", "layers", "output"]]
    named = parameters()
    method = build_semi_sync(named, section(sync_steps=2), fragments)
    for step in range(1, 7):
        train(named, step)
        if method.is_due(step):
            method.apply(step, method.values(step))
        if step == num_steps:
            weights = [(name, parameter.clone()) for name, parameter in named]
            state = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    resumed = build_semi_sync(weights, section(sync_steps=2), fragments)
    resumed.load_state_dict(state)
    for step in range(num_steps + 1, 7):
        train(weights, step)
        if resumed.is_due(step):
            resumed.apply(step, resumed.values(step))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named, weights, strict=True))
    keys = {name.split(".")[0] for name in state}
    assert keys == {"StreamingDiLoCoFragment_0"}
