"""All optimizer implementations equal torch, skip non-finite updates, and can step in backward."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_like.config.sections_training import Optimizer
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.optim import optimizer as optimizers
from torchtitan_like.optim.optimizer import OptimizerContext, step_or_restore
from torchtitan_like.util.shards import local_positions


def section(**changes):
    return Optimizer(**{"lr": 0.1, **changes})


def build_optimizer(named, section, sharding=()):
    context = OptimizerContext(
        sharding, partial(MatrixOwners, group=None), local_positions, torch.device("cpu"), 0, {}
    )
    return optimizers.build_optimizer(named, section, context)


def model_and_loss():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, lambda: model(torch.arange(8.0).view(2, 4) / 8).square().sum()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_updates_equal_torchs_optimizer(name, implementation):
    model, loss = model_and_loss()
    expected_model, expected_loss = model_and_loss()
    optimizer = build_optimizer(
        model.named_parameters(), section(name=name, eps=1e-3, implementation=implementation)
    )
    reference = getattr(torch.optim, name)(
        expected_model.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step(skip=torch.zeros(()))
        reference.zero_grad()
        expected_loss().backward()
        reference.step()
    torch.testing.assert_close(weights(model), weights(expected_model), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_skipped_step_changes_neither_weights_nor_state(implementation):
    model, loss = model_and_loss()
    optimizer = build_optimizer(model.named_parameters(), section(implementation=implementation))
    loss().backward()
    optimizer.step(skip=torch.zeros(()))
    before = weights(model), {k: v.clone() for k, v in optimizer.state_dict().items()}
    for p in model.parameters():
        p.grad.fill_(torch.nan)
    optimizer.step(skip=torch.ones(()))
    assert torch.equal(weights(model), before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in optimizer.state_dict().items())


CLIPPED = [
    *(
        {"name": name, "implementation": kind}
        for name in ("Adam", "AdamW")
        for kind in IMPLEMENTATIONS
    ),
    {"name": "AdamW", "state_dtype": "float32"},
    {"name": "Lion"},
    {"name": "Muon"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", CLIPPED, ids=lambda settings: "-".join(settings.values()))
def test_clipping_divides_by_the_norm_in_float32(settings, dtype):
    """All implementations of all optimizers follow this rule to the last bit."""
    models = [model_and_loss()[0].to(dtype) for _ in range(2)]
    clipped, divided = (
        build_optimizer(model.named_parameters(), section(**settings), [("0.weight", "column")])
        for model in models
    )
    for is_clipped in (True, True, False):
        for model in models:
            for p in model.parameters():
                p.grad = torch.linspace(-3, 2, p.numel(), dtype=dtype).view_as(p)
        if is_clipped:
            norm = clipped.clip_gradients(0.1)
            assert norm > 1
            for p in divided.parameters:
                p.grad /= ((norm + 1e-6) / 0.1).float()
        clipped.step(skip=torch.zeros(()))
        divided.step(skip=torch.zeros(()))
    assert torch.equal(*map(weights, models))
    state = divided.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in clipped.state_dict().items())


class GradientPasses(TorchDispatchMode):
    """Lists the operators, except views, that read or write one of the gradients."""

    def __init__(self, gradients):
        super().__init__()
        self._storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if storages & self._storages and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"name": "AdamW"}, ["_fused_adamw_"]),
        ({"name": "Adam"}, ["_fused_adam_"]),
        ({"name": "Lion"}, ["div"] * 4),
    ],
    ids=["AdamW", "Adam", "Lion"],
)
def test_a_fused_step_reads_gradients_only_for_the_norm_and_the_update(settings, passes):
    model, loss = model_and_loss()
    optimizer = build_optimizer(model.named_parameters(), section(**settings))
    loss().backward()
    with GradientPasses([p.grad for p in model.parameters()]) as gradient_passes:
        optimizer.clip_gradients(0.1)
        optimizer.step(skip=torch.zeros(()))
    assert gradient_passes.names == ["_foreach_norm", *passes]


def test_a_parameter_without_a_gradient_is_named():
    model, _ = model_and_loss()
    model[0].bias.requires_grad_(False)  # frozen: needs no gradient
    optimizer = build_optimizer(model.named_parameters(), section())
    model[2](torch.ones(8)).backward()
    with pytest.raises(
        RuntimeError,
        match=r"^1 of 3 parameters have no gradient: 0\.weight\. .*requires_grad = False",
    ):
        optimizer.clip_gradients(1.0)


def test_no_weight_decay_matches_parameter_names():
    model, _ = model_and_loss()
    optimizer = build_optimizer(model.named_parameters(), section(no_weight_decay=["*.bias"]))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step(skip=torch.zeros(()))
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"0.weight", "2.weight"}


def test_groups_have_their_own_settings():
    """The first step of Adam is lr * sign(gradient), and gradients of 0 leave the decay alone."""
    model, loss = model_and_loss()
    groups = {
        "head": {"parameters": ["2.*"], "lr": 0.5},
        "first": {"parameters": ["0.weight"], "weight_decay": 0.0, "name": "Adam"},
    }
    optimizer = build_optimizer(
        model.named_parameters(), section(groups=groups, no_weight_decay=["*.bias"], eps=1e-30)
    )
    optimizer.scale_lr(0.5)
    assert (optimizer.lr, optimizer.group_lr) == (0.05, {"head": 0.25, "first": 0.05})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss().backward()
    optimizer.step(skip=torch.zeros(()))
    for name, lr, weight_decay in (
        ("0.weight", 0.05, 0.0),
        ("0.bias", 0.05, 0.0),
        ("2.weight", 0.25, 0.1),
        ("2.bias", 0.25, 0.0),
    ):
        p = model.get_parameter(name)
        expected = before[name] * (1 - lr * weight_decay) - lr * p.grad.sign()
        torch.testing.assert_close(p.detach(), expected, msg=name)
    kinds = [type(each) for each in optimizer._optimizers]
    assert sorted(kind.__name__ for kind in kinds) == ["Adam", "AdamW"]


def test_groups_work_with_steps_in_backward():
    groups = {"head": {"parameters": ["2.*"], "lr": 0.5, "name": "Adam"}}
    results = []
    for early in (False, True):
        model, loss = model_and_loss()
        optimizer = build_optimizer(
            model.named_parameters(), section(groups=groups, early_step_in_backward=early)
        )
        optimizer.scale_lr(0.5)
        loss().backward()
        optimizer.clip_gradients(float("inf"))
        optimizer.step(skip=torch.zeros(()))
        results.append(weights(model))
    assert torch.equal(*results)


def test_a_parameter_in_two_groups_is_refused():
    groups = {"a": {"parameters": ["0.*"]}, "b": {"parameters": ["*.bias"]}}
    with pytest.raises(ValueError, match=r"^0\.bias is in the parameter groups a and b\. "):
        build_optimizer(model_and_loss()[0].named_parameters(), section(groups=groups))


def test_the_state_has_flat_names_from_the_start_and_can_be_loaded():
    model, loss = model_and_loss()
    optimizer = build_optimizer(model.named_parameters(), section())
    assert set(optimizer.state_dict()) == {
        f"state.{n}.{key}"
        for n, _ in model.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    loss().backward()
    optimizer.step(skip=torch.zeros(()))
    other = build_optimizer(model_and_loss()[0].named_parameters(), section())
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(v, optimizer.state_dict()[k]) for k, v in other.state_dict().items())
    assert other.state_dict()["state.0.weight.step"] == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_in_backward_equal_steps_after_backward(implementation):
    regular_model, regular_loss = model_and_loss()
    early_model, early_loss = model_and_loss()
    regular = build_optimizer(
        regular_model.named_parameters(), section(implementation=implementation)
    )
    early = build_optimizer(
        early_model.named_parameters(),
        section(implementation=implementation, early_step_in_backward=True),
    )
    for _ in range(3):
        norms = []
        for optimizer, loss in ((regular, regular_loss), (early, early_loss)):
            optimizer.zero_grad()
            loss().backward()
            norms.append(optimizer.clip_gradients(float("inf")))
            optimizer.step(skip=torch.zeros(()))
        assert norms[0] == pytest.approx(norms[1].item(), rel=1e-6)
        assert all(p.grad is None for p in early_model.parameters())
    assert torch.equal(weights(regular_model), weights(early_model))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_in_backward_skip_non_finite_gradients(implementation):
    model, loss = model_and_loss()
    optimizer = build_optimizer(
        model.named_parameters(),
        section(implementation=implementation, early_step_in_backward=True),
    )
    before = weights(model)
    (loss() * torch.nan).backward()
    assert torch.equal(weights(model), before)
    optimizer.clip_gradients(1.0)
    optimizer.step(skip=torch.ones(()))
    loss().backward()  # finite again, but updates are frozen
    assert torch.equal(weights(model), before)


def test_steps_in_backward_wait_for_gradients_copied_to_the_host(monkeypatch):
    """FSDP2 in torch 2.11 calls the hook of an offloaded parameter before the copy is complete."""
    model, _ = model_and_loss()
    optimizer = build_optimizer(model.named_parameters(), section(early_step_in_backward=True))
    block = list(model[0].parameters())
    for parameter in block:
        parameter.grad = torch.full_like(parameter, 9.0)  # the memory before the copy
    stream = SimpleNamespace(synchronize=lambda: [parameter.grad.fill_(1.0) for parameter in block])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    for parameter in block:
        for hook in parameter._post_accumulate_grad_hooks.values():
            hook(parameter)
    num_elements = sum(parameter.numel() for parameter in block)
    assert optimizer.clip_gradients(1.0) == pytest.approx(num_elements**0.5)


def test_steps_in_backward_name_a_parameter_without_a_gradient():
    model, _ = model_and_loss()
    optimizer = build_optimizer(model.named_parameters(), section(early_step_in_backward=True))
    (model[2](torch.ones(8)).sum() + model[0].weight.sum()).backward()
    with pytest.raises(
        RuntimeError,
        match=r"^1 of 4 parameters have no gradient: 0\.bias\. .*requires_grad = False",
    ):
        optimizer.clip_gradients(1.0)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_a_skipped_update_is_restored_bit_by_bit(name, implementation):
    """On GPUs, implementations without a built-in skip take the step and restore the old state."""
    updated, loss = model_and_loss()
    skipped, plain = copy.deepcopy(updated), copy.deepcopy(updated)
    optimizers = []
    for model in (updated, skipped, plain):
        optimizer = build_optimizer(
            model.named_parameters(), section(name=name, implementation=implementation)
        )
        optimizers.append(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
    optimizers[2].step(skip=torch.zeros(()))
    step_or_restore(optimizers[0]._optimizers[0], torch.zeros(()))
    assert torch.equal(weights(updated), weights(plain))
    skipped[0].weight.grad[0, 0] = torch.nan
    before = (
        weights(skipped),
        {name: value.clone() for name, value in optimizers[1].state_dict().items()},
    )
    step_or_restore(optimizers[1]._optimizers[0], torch.ones(()))
    assert torch.equal(weights(skipped), before[0])
    assert all(
        torch.equal(value, before[1][name]) for name, value in optimizers[1].state_dict().items()
    )
