"""Muon equals torch's to the last bit on one rank, and updates only matrices of hidden layers."""

from functools import partial

import pytest
import torch

from torchtitan_like.config.sections_training import Optimizer
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.optim import optimizer as optimizers
from torchtitan_like.optim.groups import group_parameters
from torchtitan_like.optim.muon import orthogonalize
from torchtitan_like.util.shards import local_positions

SHARDING = (
    ("tok_embeddings.weight", "vocab_embedding"),
    ("*.wq.*", "column"),
    ("*.wo.*", "row"),
    ("*.experts.*", "experts"),
    ("*.gate.weight", "router"),
    ("*norm*", "latent"),
    ("output.weight", "output"),
)
SKIP, KEEP = torch.ones(()), torch.zeros(())


def build(named, **settings):
    context = optimizers.OptimizerContext(
        SHARDING, partial(MatrixOwners, group=None), local_positions, torch.device("cpu"), 0, {}
    )
    section = Optimizer(**{"name": "Muon", "lr": 0.02, **settings})
    return optimizers.build_optimizer(named.items(), section, context)


def parameter(*shape, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return torch.nn.Parameter(values.to(dtype))


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_weights_equal_torchs_muon_to_the_last_bit(dtype, nesterov, adjust):
    shapes = [(24, 16), (16, 40), (32, 32)]
    named = {f"layers.{i}.wq.weight": parameter(*s, dtype=dtype) for i, s in enumerate(shapes)}
    expected = [torch.nn.Parameter(p.detach().clone()) for p in named.values()]
    optimizer = build(named, muon_nesterov=nesterov, muon_adjust_lr_fn=adjust)
    reference = torch.optim.Muon(
        expected, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust
    )
    for step in range(4):
        for parameters in (named.values(), expected):
            set_gradients(parameters, step)
        optimizer.step(KEEP)
        reference.step()
        if not nesterov and dtype == torch.bfloat16:
            break  # torch's update then divides the momentum in place, which changes later steps
    assert all(torch.equal(p, q) for p, q in zip(named.values(), expected, strict=True))


def test_stacked_experts_are_orthogonalized_matrix_by_matrix():
    stack = {"layers.0.experts.w1": parameter(3, 8, 12)}
    single = {
        f"layers.{i}.wq.weight": torch.nn.Parameter(matrix.clone())
        for i, matrix in enumerate(stack["layers.0.experts.w1"].detach())
    }
    optimizers_of = [build(named) for named in (stack, single)]
    for step in range(2):
        set_gradients(stack.values(), step)
        for p, grad in zip(single.values(), stack["layers.0.experts.w1"].grad, strict=True):
            p.grad = grad.clone()
        for optimizer in optimizers_of:
            optimizer.step(KEEP)
    assert torch.equal(
        stack["layers.0.experts.w1"].detach(), torch.stack([p.detach() for p in single.values()])
    )


def test_orthogonalized_matrices_have_singular_values_near_one():
    values = torch.randn(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for matrix in (values, values.T.contiguous()):
        result = orthogonalize(matrix, num_steps=5, eps=1e-7)
        singular = torch.linalg.svdvals(result)
        assert 0.6 < singular.min()
        assert singular.max() < 1.3  # the range of the polynomial, Jordan et al.
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        rotated = left.T @ result @ right.T  # diagonal: `matrix` has the same singular vectors
        torch.testing.assert_close(rotated, torch.diag(rotated.diag()), rtol=0, atol=1e-12)


def test_muon_updates_only_matrices_of_hidden_layers():
    named = {
        "tok_embeddings.weight": parameter(9, 4),
        "layers.0.wq.weight": parameter(4, 4),
        "layers.0.wq.bias": parameter(4),
        "layers.0.kv_norm.weight": parameter(4),
        "layers.0.gate.weight": parameter(3, 4),
        "layers.0.experts.w1": parameter(3, 5, 4),
        "layers.0.experts.b1": parameter(3, 5),
        "layers.1.wo.weight": parameter(4, 4),
        "output.weight": parameter(9, 4),
    }
    groups = {"last": {"parameters": ["layers.1.*"], "name": "AdamW", "lr": 0.5}}
    section = Optimizer(name="Muon", groups=groups, no_weight_decay=["*.wq.weight"])
    found = {
        name: (group.optimizer, group.lr, group.weight_decay)
        for group in group_parameters(named.items(), section, SHARDING)
        for name, _ in group.members
    }
    muon = {name for name, (optimizer, *_) in found.items() if optimizer == "Muon"}
    assert muon == {"layers.0.wq.weight", "layers.0.experts.w1"}
    assert found["layers.0.wq.weight"][2] == 0.0
    assert found["layers.1.wo.weight"] == ("AdamW", 0.5, 0.1)


def test_a_skipped_step_keeps_all_bits():
    named = {"layers.0.wq.weight": parameter(6, 4), "output.weight": parameter(5, 4)}
    optimizer = build(named)
    set_gradients(named.values(), 0)
    optimizer.step(KEEP)
    before = {**optimizer.state_dict(), **{name: p.detach() for name, p in named.items()}}
    before = {name: value.clone() for name, value in before.items()}
    for p in named.values():
        p.grad.fill_(torch.nan)
    optimizer.step(SKIP)
    after = {**optimizer.state_dict(), **{name: p.detach() for name, p in named.items()}}
    assert after.keys() == before.keys()
    assert "state.layers.0.wq.weight.momentum_buffer" in after
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_saved_state_continues_the_same_run():
    runs = []
    for resumes in (False, True):
        named = {"layers.0.wq.weight": parameter(6, 4), "output.weight": parameter(5, 4)}
        optimizer = build(named)
        for step in range(4):
            if resumes and step == 2:
                state = {name: value.clone() for name, value in optimizer.state_dict().items()}
                optimizer = build(named)
                optimizer.load_state_dict(state)
            set_gradients(named.values(), step)
            optimizer.step(KEEP)
        runs.append(torch.cat([p.detach().flatten() for p in named.values()]))
    assert torch.equal(*runs)


def test_an_optimizer_without_matrices_steps():
    """The last stage of a pipeline may have none, and the step is a collective."""
    named = {"output.weight": parameter(5, 4)}
    optimizer = build(named)
    set_gradients(named.values(), 0)
    optimizer.scale_lr(0.5)
    optimizer.step(KEEP)
    assert len(optimizer._optimizers) == 2


def test_the_log_lines_report_the_memory_of_a_parameter():
    """AdamW has two states of 4 bytes and a step count for each tensor; Muon has one state."""
    named = {"layers.0.wq.weight": parameter(60, 40), "output.weight": parameter(50, 40)}
    lines = build(named, groups={"head": {"parameters": ["output.*"], "lr": 0.5}}).describe()
    assert lines == [
        "Optimizer: Muon, peak lr 0.02, weight decay 0.1: 1 tensors, 2,400 parameters on this rank, "
        "12.00 bytes per parameter (weight 4.00 + gradient 4.00 + state 4.00)",
        "Optimizer: AdamW (group head), peak lr 0.5, weight decay 0.1: 1 tensors, 2,000 parameters "
        "on this rank, 16.00 bytes per parameter (weight 4.00 + gradient 4.00 + state 8.00)",
    ]
