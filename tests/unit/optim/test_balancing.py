"""On one rank, the biases and load fractions after a step equal numbers computed by hand."""

from fractions import Fraction

import pytest
import torch

from tests.unit.models.test_balance import EXPERTS, TOP_K, build, some
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.world import HostGroup, World
from torchtitan_like.models.layers.balance import Balance
from torchtitan_like.optim.balancing import ExpertBalancer, bias_changes

TAKE_STEP, SKIP_STEP = torch.zeros(()), torch.ones(())


def world():
    return World(
        rank=0,
        local_rank=0,
        dims=ParallelDims(1),
        device=torch.device("cpu"),
        mesh=None,
        experts_mesh=None,
        step_group=HostGroup.alone(),
        checkpoint_group=HostGroup.alone(),
        owns_default_group=False,
    )


def balanced(method, **options):
    """Return a MoE layer and its balancer."""
    moe = build(Balance(method, **options))
    balancer = ExpertBalancer(
        [torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"4": moe})})],
        world(),
        sequence_parallel=True,
    )
    balancer.prepare(34)
    return moe, balancer


@pytest.mark.parametrize(
    "counts", [[3, 3, 3, 3], [1, 2, 3, 4], [7, 0, 0], [2**40, 2**40 + 1, 2**40 - 1], [5, 4, 4]]
)
def test_the_bias_change_is_a_centered_sign(counts):
    """Compare gamma * sign(mean - count), minus its mean, with exact fractions."""
    mean = Fraction(sum(counts), len(counts))
    signs = [(mean > count) - (mean < count) for count in counts]
    expected = [0.5 * float(sign - Fraction(sum(signs), len(signs))) for sign in signs]
    (change,) = bias_changes(torch.tensor([counts]), 0.5)
    assert change.tolist() == torch.tensor(expected, dtype=torch.float32).tolist()


def test_a_step_moves_the_biases_and_resets_the_counts():
    moe, balancer = balanced("bias", coeff=0.25)
    for _ in range(2):  # micro-batches
        moe(some().requires_grad_()).sum().backward()
    counts = moe.tokens_per_expert.clone()
    balancer.update(TAKE_STEP, is_logged=True)
    assert torch.equal(moe.expert_bias, bias_changes(counts[None], 0.25)[0])
    assert moe.expert_bias.abs().max() > 0.2
    assert not moe.tokens_per_expert.any() and not moe.router_sums.any()
    loads = balancer.read()
    assert loads.choices == [counts.tolist()] and counts.sum() == 2 * 34 * TOP_K
    assert loads.bias_range == [(moe.expert_bias.max() - moe.expert_bias.min()).item()]
    assert loads.aux_loss is None


def test_a_skipped_step_changes_no_state_and_discards_its_counts():
    for method in ("bias", "global"):
        moe, balancer = balanced(method)
        moe(some().requires_grad_()).sum().backward()
        balancer.update(TAKE_STEP, is_logged=False)
        state = [moe.expert_bias, moe.load_fractions]
        before = [None if tensor is None else tensor.clone() for tensor in state]
        moe(some(seed=5).requires_grad_()).sum().backward()
        balancer.update(SKIP_STEP, is_logged=False)
        for old, new in zip(before, [moe.expert_bias, moe.load_fractions], strict=True):
            assert old is None or torch.equal(old, new)
        assert not moe.tokens_per_expert.any()


def test_load_fractions_are_from_the_previous_step():
    moe, balancer = balanced("global")
    assert moe.load_fractions.tolist() == [1.0] * EXPERTS
    moe(some().requires_grad_()).sum().backward()
    expected = moe.tokens_per_expert.double() * EXPERTS / (34 * TOP_K)
    balancer.update(TAKE_STEP, is_logged=True)
    torch.testing.assert_close(moe.load_fractions, expected.float())
    assert balancer.read().aux_loss == [pytest.approx(1.0)]  # the load fractions were equal
    (name,) = balancer.state_dict()
    assert name == "state.layers.4.load_fractions"
    moe.load_fractions.fill_(0)
    balancer.load_state_dict({name: expected.float()})
    torch.testing.assert_close(moe.load_fractions, expected.float())


def test_the_loss_scale_depends_on_the_tokens_of_a_step():
    moe, balancer = balanced("sequence")
    assert moe.loss_scale.item() == 1 / 34
    balancer.prepare(68)
    assert moe.loss_scale.item() == 1 / 68


def test_without_balancing_counts_are_summed_only_at_log_steps():
    moe, balancer = balanced("none")
    sums = []
    balancer._sum_over_ranks = lambda values: sums.append(values.shape) or values
    moe(some().requires_grad_()).sum().backward()
    balancer.update(TAKE_STEP, is_logged=False)
    assert sums == [] and not moe.tokens_per_expert.any()
    moe(some().requires_grad_()).sum().backward()
    balancer.update(TAKE_STEP, is_logged=True)
    assert sums == [(1, EXPERTS), (1, 3)]
    z = moe.router.logits(some()).logsumexp(-1).square().mean().item()
    assert balancer.read().router_z == [pytest.approx(z)]


def test_layers_that_differ_are_refused():
    layers = torch.nn.ModuleList([build(Balance("bias")), build(Balance("global"))])
    with pytest.raises(ValueError, match="differ in their number of experts or their balance"):
        ExpertBalancer([layers], world(), sequence_parallel=True)


def test_layers_are_balanced_by_their_own_loads():
    """Row i of a step is layer i in the order of the model, whatever the order of the parts."""
    layers = {str(number): build(Balance("bias", coeff=0.25)) for number in (10, 2)}
    parts = [torch.nn.ModuleDict({number: layer}) for number, layer in layers.items()]
    balancer = ExpertBalancer(parts, world(), sequence_parallel=True)
    assert [layer.number for layer in balancer.layers] == [2, 10]
    for seed, layer in enumerate(layers.values()):
        layer(some(seed=seed).requires_grad_()).sum().backward()
    counts = {number: layer.tokens_per_expert.clone() for number, layer in layers.items()}
    balancer.update(TAKE_STEP, is_logged=True)
    assert balancer.read().choices == [counts["2"].tolist(), counts["10"].tolist()]
    for number, layer in layers.items():
        assert torch.equal(layer.expert_bias, bias_changes(counts[number][None], 0.25)[0])
    assert balancer.named_state().keys() == {"10.expert_bias", "2.expert_bias"}
    assert balancer.state_dict() == {}
