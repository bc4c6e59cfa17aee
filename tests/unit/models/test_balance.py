"""Counting the choices of experts, the bias that selects them, and the router's losses."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.unit.models.test_moe import DIM, EXPERTS, HIDDEN, some
from torchtitan_like.distributed.activation import SAVED_OPS, _PerOpPolicy
from torchtitan_like.models.argument_rules import check_balance
from torchtitan_like.models.layers.balance import Balance
from torchtitan_like.models.layers.moe import Experts, MoE, Router

TOP_K = 2


def build(balance=None, score_func="softmax", top_k=TOP_K, dtype=torch.float64):
    torch.manual_seed(0)
    router = Router(DIM, EXPERTS, top_k, score_func, normalize=True, scale=1.0)
    experts = Experts(EXPERTS, DIM, HIDDEN)
    moe = MoE(router, experts, None, balance=balance or Balance()).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def choices(moe, x):
    """Return the number of choices of each expert, from the router's output."""
    _, expert_ids = moe.router(x.flatten(0, -2), moe.expert_bias)
    return torch.bincount(expert_ids.flatten(), minlength=EXPERTS)


# ---- counting


def checkpointed(forward, mode):
    if mode == "none":
        return forward
    options = {}
    if mode == "op":
        policy = partial(_PerOpPolicy, SAVED_OPS, set())
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy())
    return lambda x: checkpoint(forward, x, use_reentrant=False, **options)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        *((backend, mode) for backend in ("", "aot_eager") for mode in ("none", "full", "op")),
        *(
            pytest.param("inductor", mode, marks=pytest.mark.nightly)
            for mode in ("none", "full", "op")
        ),
    ],
)
def test_every_training_token_counts_once(backend, mode):
    """Two steps and an evaluation, with recomputation and compiled as one graph."""
    torch._dynamo.reset()
    moe = build(Balance("sequence", 0.1, 0.1), dtype=torch.float32)
    moe.loss_scale = torch.tensor(0.01, dtype=torch.float64)
    forward = checkpointed(moe.forward, mode)
    if backend:
        forward = torch.compile(forward, backend=backend, fullgraph=True)
    expected, z = torch.zeros(EXPERTS, dtype=torch.int64), 0.0
    for seed in (1, 2):
        x = some(dtype=torch.float32, seed=seed).requires_grad_()
        forward(x).square().sum().backward()
        expected += choices(moe, x)
        z += moe.router.logits(x).logsumexp(-1).square().sum().item()
    with torch.no_grad():
        forward(some(dtype=torch.float32, seed=3))
    assert moe.tokens_per_expert.tolist() == expected.tolist()
    assert expected.sum() == 2 * 2 * 17 * TOP_K
    assert moe.router_sums[1].item() == pytest.approx(z, rel=1e-5)


def test_without_balancing_no_gradient_changes():
    moe = build()
    x = some().requires_grad_()
    moe(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in moe.parameters()]
    moe.zero_grad()
    moe.loss_scale = torch.tensor(0.5, dtype=torch.float64)
    moe(x).square().sum().backward()
    for before, parameter in zip(plain, moe.parameters(), strict=True):
        assert torch.equal(before, parameter.grad)


# ---- the bias


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_the_bias_selects_experts_without_changing_weights(score_func):
    """A bias that is larger than any score selects two experts, with the weights of their scores."""
    moe = build(Balance("bias"), score_func)
    moe.expert_bias[[3, 5]] = 2.0
    tokens = some().flatten(0, -2)
    weights, expert_ids = moe.router(tokens, moe.expert_bias)
    assert expert_ids.sort(-1).values.unique(dim=0).tolist() == [[3, 5]]
    logits = moe.router.logits(tokens)
    scores = logits.sigmoid() if score_func == "sigmoid" else logits.softmax(-1)
    expected = scores.gather(-1, expert_ids)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))
    moe(some().requires_grad_()).sum().backward()
    assert moe.tokens_per_expert.nonzero().flatten().tolist() == [3, 5]


def test_the_bias_stays_in_float32():
    """1 + 2^-12 is 1 in bfloat16."""
    moe = build(Balance("bias"), dtype=torch.float32)
    moe.expert_bias += 1 + 2**-12
    moe.to(torch.bfloat16)
    assert moe.experts.w1.dtype == torch.bfloat16
    assert moe.expert_bias.dtype == torch.float32
    assert (moe.expert_bias == 1 + 2**-12).all()
    assert moe.router_sums.dtype == torch.float64


def test_checkpoints_contain_only_the_bias():
    names = {name for name in build(Balance("bias")).state_dict() if "." not in name}
    assert names == {"expert_bias"}
    for method in ("none", "sequence", "global"):  # load_fractions are with the optimizer's state
        assert all("." in name for name in build(Balance(method)).state_dict())


# ---- losses of the router


def reference_loss(moe, x, fractions):
    """Return the sums over tokens of the balance loss and of the z-loss, without coefficients."""
    logits = moe.router.logits(x)
    scores = logits.softmax(-1) if moe.router.score_func == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    return (fractions * shares).sum(), logits.logsumexp(-1).square().sum()


def equation_17(moe, x):
    """Return the fractions of a sequence by expert (arXiv:2412.19437, equation 18), using loops."""
    fractions = torch.zeros(x.shape[0], 1, EXPERTS, dtype=x.dtype)
    for sample in range(x.shape[0]):
        for logits in moe.router.logits(x[sample]):
            for expert in logits.argsort()[-TOP_K:]:
                fractions[sample, 0, expert] += EXPERTS / (TOP_K * x.shape[1])
    return fractions


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("method", ["sequence", "global"])
def test_gradients_of_the_losses_equal_autograd(method, score_func):
    moe = build(Balance(method, coeff=0.7, z_coeff=0.3), score_func)
    x, num_tokens = some(batch=3), 3 * 17
    if method == "global":
        moe.load_fractions.copy_(torch.rand(EXPERTS, generator=torch.Generator().manual_seed(7)))
        fractions = moe.load_fractions.double()
    else:
        fractions = equation_17(moe, x)
    grad = some(batch=3, seed=2)
    parameters = list(moe.parameters())
    plain = torch.autograd.grad(moe(x), parameters, grad)
    balance, z = reference_loss(moe, x, fractions)
    of_losses = torch.autograd.grad((0.7 * balance + 0.3 * z) / num_tokens, moe.router.gate.weight)[
        0
    ]
    moe.init_buffers(torch.device("cpu"))
    if method == "global":
        moe.load_fractions.copy_(fractions)
    moe.loss_scale = torch.tensor(1 / num_tokens, dtype=torch.float64)
    own_gradients = torch.autograd.grad(moe(x), parameters, grad)
    added = own_gradients[0] - plain[0]
    assert (added - of_losses).norm() <= 1e-12 * of_losses.norm()
    for before, after in zip(plain[1:], own_gradients[1:], strict=True):
        assert torch.equal(before, after)
    assert moe.router_sums.tolist() == pytest.approx([balance.item(), z.item()], rel=1e-12)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_a_sequence_loss_in_addition_to_biases(score_func):
    """The bias affects the selection of experts, but not the choices in the loss (equation 18)."""
    x, grad = some(batch=3), some(batch=3, seed=2)

    def gradients(balance):
        moe = build(balance, score_func)
        if moe.expert_bias is not None:
            moe.expert_bias[[3, 5]] = 2.0
        moe.loss_scale = torch.tensor(1 / 51, dtype=torch.float64)
        return moe, torch.autograd.grad(moe(x), list(moe.parameters()), grad)

    alone, without_bias = gradients(Balance("sequence", coeff=0.7))
    base = gradients(Balance())[1]
    plain = gradients(Balance("bias", coeff=0.01))[1]
    moe, own_gradients = gradients(Balance("bias", coeff=0.01, sequence_coeff=0.7))
    of_loss = without_bias[0] - base[0]
    assert (own_gradients[0] - plain[0] - of_loss).norm() <= 1e-10 * of_loss.norm()
    for before, after in zip(plain[1:], own_gradients[1:], strict=True):
        assert torch.equal(before, after)
    assert moe.router_sums.tolist() == alone.router_sums.tolist()
    assert moe.tokens_per_expert.nonzero().flatten().tolist() == [3, 5]


def test_even_fractions_have_no_gradient():
    """In the first step of "global", the scores of a token sum to 1 for any logits."""
    moe = build(Balance("global", coeff=1.0))
    x, grad = some(), some(seed=2)
    plain = torch.autograd.grad(moe(x), moe.router.gate.weight, grad)[0]
    moe.loss_scale = torch.tensor(1.0, dtype=torch.float64)
    own_gradients = torch.autograd.grad(moe(x), moe.router.gate.weight, grad)[0]
    assert (own_gradients - plain).norm() <= 1e-14 * plain.norm()


def test_logits_far_below_zero_have_finite_gradients():
    moe = build(Balance("sequence", coeff=1.0), "sigmoid", dtype=torch.float32)
    moe.loss_scale = torch.tensor(1.0)
    with torch.no_grad():
        moe.router.gate.weight.fill_(-100.0)
    moe(some(dtype=torch.float32).abs()).sum().backward()
    assert moe.router.gate.weight.grad.isfinite().all()


# ---- experts in turn


def test_forced_routing_selects_experts_in_turn():
    moe = build(top_k=3)
    moe.is_round_robin = True
    x = some().requires_grad_()
    moe(x).sum().backward()
    # 17 positions of 3 choices: 51 choices of 8 experts in each of 2 samples.
    assert moe.tokens_per_expert.tolist() == [14, 14, 14, 12, 12, 12, 12, 12]
    assert moe.router.gate.weight.grad.abs().max() > 0
    logits = moe.router.logits(x)
    expected = logits[:, 1, [3, 4, 5]].softmax(-1)
    weights = moe.router.weigh(logits.flatten(0, 1), moe._in_turn(x)).view(2, 17, 3)
    torch.testing.assert_close(weights[:, 1], expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("even", 1e-3, 0.0, 8), "load_balance = 'even': expected one of 'none', 'bias'"),
        (("bias", 1e-3, 0.0, 0), "load_balance = 'bias': expected 'none', since num_experts = 0"),
        (("bias", -1.0, 0.0, 8), "load_balance_coeff = -1.0"),
        (("bias", 1e-3, float("nan"), 8), "router_z_coeff = nan"),
        (("global", 1e-3, 0.0, 8, 1e-4), "sequence_loss_coeff = 0.0001: expected 0 with load_bal"),
        (("bias", 1e-3, 0.0, 8, -1e-4), "sequence_loss_coeff = -0.0001: expected a number"),
    ],
)
def test_an_invalid_argument_is_named(arguments, words):
    (problem,) = check_balance(*arguments)
    assert words in problem
