"""The layers of a mixture of experts equal simple reference code."""

import pytest
import torch
from torch.nn import functional as F

from torchtitan_like.models.layers.grouped_linear import (
    add_group_bias,
    grouped_linear,
    product_of,
    select_product,
)
from torchtitan_like.models.layers.moe import (
    Experts,
    MoE,
    Router,
    combine,
    describe_experts,
    sort_by_expert,
)

DIM, HIDDEN, EXPERTS = 32, 16, 8


def build(
    top_k=2, score_func="softmax", normalize=True, scale=1.0, hidden=HIDDEN, dtype=torch.float64
):
    torch.manual_seed(0)
    router = Router(DIM, EXPERTS, top_k, score_func, normalize, scale)
    moe = MoE(router, Experts(EXPERTS, DIM, hidden), None).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def loop_over_experts(moe, x):
    """Compute each expert separately, with scores as in the papers."""
    tokens = x.flatten(0, -2)
    logits = tokens @ moe.router.gate.weight.T
    scores = logits.softmax(-1) if moe.router.score_func == "softmax" else logits.sigmoid()
    weights, expert_ids = scores.topk(moe.router.top_k)
    if moe.router.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        token, slot = (expert_ids == expert).nonzero(as_tuple=True)
        rows = tokens[token]
        hidden = F.silu(rows @ moe.experts.w1[expert].T) * (rows @ moe.experts.w3[expert].T)
        results = hidden @ moe.experts.w2[expert].T
        out = out.index_add(0, token, results * weights[token, slot, None] * moe.router.scale)
    return out.view_as(x)


def gradients(function, moe, x, grad):
    x = x.clone().requires_grad_()
    out = function(x)
    return out, torch.autograd.grad(out, [x, *moe.parameters()], grad)


def assert_same(moe, x, limit):
    """Errors are relative to the largest gradient, because the gradient of the gate may be 0."""
    grad = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    out, actual = gradients(moe, moe, x, grad)
    expected, reference_gradients = gradients(lambda x: loop_over_experts(moe, x), moe, x, grad)
    assert (out - expected).abs().max() <= limit * expected.abs().max()
    largest = max(reference.abs().max() for reference in reference_gradients)
    for own, reference in zip(actual, reference_gradients, strict=True):
        assert (own - reference).abs().max() <= limit * largest


def some(batch=2, seq=17, dtype=torch.float64, seed=1):
    return torch.randn(batch, seq, DIM, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_the_layer_equals_a_loop_over_experts(score_func, normalize, top_k):
    assert_same(build(top_k, score_func, normalize, scale=2.5), some(), 1e-13)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("hidden", [HIDDEN, HIDDEN + 1])
def test_the_layer_equals_a_loop_with_and_without_the_kernel(dtype, limit, hidden):
    """`grouped_mm` supports neither rows of 17 elements nor float64."""
    supported = dtype == torch.float32 and hidden == HIDDEN
    assert product_of(dtype, DIM, hidden) == ("kernel" if supported else "loop")
    assert_same(build(hidden=hidden, dtype=dtype), some(dtype=dtype), limit)


def test_a_batch_of_one_token():
    assert_same(build(), some(batch=1, seq=1), 1e-13)


def test_all_tokens_may_choose_the_same_experts():
    moe = build()
    with torch.no_grad():
        moe.router.gate.weight.zero_()
        moe.router.gate.weight[3] = 1.0
    tokens = some().abs()
    _, expert_ids = moe.router(tokens.flatten(0, -2))
    assert (expert_ids[:, 0] == 3).all()
    assert_same(moe, tokens, 1e-13)


def test_a_batch_without_tokens():
    moe = build()
    x = some()[:0].requires_grad_()
    out = moe(x)
    out.sum().backward()
    assert out.shape == (0, 17, DIM)
    assert all(parameter.grad.abs().max() == 0 for parameter in moe.parameters())


SCORES = {
    "equal": 0.0,
    "minus infinity": -torch.inf,
    "infinity": torch.inf,
    "not a number": torch.nan,
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    ("score_func", "num_groups", "has_bias"),
    [("softmax", 1, False), ("sigmoid", 1, True), ("sigmoid", 4, True), ("softmax", 4, False)],
)
def test_every_token_has_top_k_experts(scores, score_func, num_groups, has_bias):
    """No scores leave a token without an expert, or give it one twice."""
    top_k = 4 if score_func == "sigmoid" else 2
    router = Router(DIM, EXPERTS, top_k, score_func, True, 1.0, num_groups, min(num_groups, 2))
    logits = torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(4))
    logits[1] = SCORES[scores]
    logits[2, 3] = SCORES[scores]
    ids = router.select(logits, torch.zeros(EXPERTS) if has_bias else None)
    assert ids.shape == (6, top_k) and 0 <= ids.min() and ids.max() < EXPERTS
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_a_token_with_scores_that_are_not_numbers_changes_no_other_token():
    """Its own output is not a number, so that the step is skipped and not trained wrongly."""
    moe, x = build(), some(1, 9)
    expected = moe(x)
    broken = x.clone()
    broken[0, 4] = torch.nan
    out = moe(broken)
    assert out[0, 4].isnan().all()
    others = torch.arange(9) != 4
    assert (out[0, others] - expected[0, others]).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("hidden", "dtype", "kernel"),
    [
        (16, torch.bfloat16, "grouped_mm"),
        (16, torch.float32, "grouped_mm"),
        (16, torch.float64, "a loop over experts"),  # grouped_mm has no float64
        (20, torch.bfloat16, "a loop over experts"),  # nor rows that are no multiple of 16 bytes
    ],
)
def test_the_log_names_what_computes_the_experts(hidden, dtype, kernel):
    line = f"Experts: 8 in each layer, computed by {kernel} in {dtype}"
    assert describe_experts(build(hidden=hidden), dtype) == [line]
    assert describe_experts(torch.nn.Linear(2, 2), dtype) == []


def test_shared_experts_are_added():
    moe = build()
    shared = torch.nn.Linear(DIM, DIM, dtype=torch.float64)
    with_shared = MoE(moe.router, moe.experts, shared)
    torch.testing.assert_close(with_shared(some()), moe(some()) + shared(some()))


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    moe = build(top_k=1)
    with torch.no_grad():
        moe.router.gate.weight[0] = -1.0
    moe(some().abs()).sum().backward()
    grad = moe.experts.w1.grad
    assert grad[0].abs().max() == 0 and grad[1:].abs().max() > 0


def test_rows_of_an_expert_keep_the_order_of_the_tokens():
    expert_ids = torch.tensor([[2, 0], [0, 1], [2, 1]])
    routes = sort_by_expert(expert_ids, torch.ones(3, 2), 4)
    assert routes.token_of_row.tolist() == [0, 1, 1, 2, 0, 2]
    assert routes.ends.tolist() == [2, 4, 6, 6] and routes.ends.dtype == torch.int32
    assert expert_ids.flatten()[routes.slot_of_row].tolist() == [0, 0, 1, 1, 2, 2]
    assert routes.slot_of_row[routes.row_of_slot.flatten()].tolist() == list(range(6))


def route(score_func, groups=(1, 1), bias=None, top_k=2):
    moe = build(top_k, score_func, normalize=False)
    moe.router.num_groups, moe.router.num_limited_groups = groups
    tokens = some().flatten(0, -2)
    logits = tokens @ moe.router.gate.weight.T
    scores = logits.softmax(-1) if score_func == "softmax" else logits.sigmoid()
    weights, expert_ids = moe.router(tokens, bias)
    torch.testing.assert_close(weights, scores.gather(-1, expert_ids))
    return scores, expert_ids


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_the_bias_selects_experts_without_changing_weights(score_func):
    bias = torch.linspace(-0.2, 0.2, EXPERTS)
    scores, expert_ids = route(score_func, bias=bias)
    assert torch.equal(expert_ids, (scores + bias).topk(2).indices)
    assert not torch.equal(expert_ids, scores.topk(2).indices)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_only_experts_of_the_best_groups_are_chosen(score_func):
    """A group's score is its two best scores in DeepSeek-V3, its best score in V2."""
    scores, expert_ids = route(score_func, groups=(4, 2), top_k=4)
    num_best = 2 if score_func == "sigmoid" else 1
    unlimited = 0
    for row, ids in zip(scores.tolist(), expert_ids.tolist(), strict=True):
        pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]

        def group_score(pair, row=row):
            return sum(sorted((row[e] for e in pair), reverse=True)[:num_best])

        allowed = [e for pair in sorted(pairs, key=group_score)[-2:] for e in pair]
        assert sorted(ids) == sorted(allowed)
        assert ids == sorted(ids, key=lambda e, row=row: -row[e])
        unlimited += sorted(ids) == sorted(
            sorted(range(EXPERTS), key=lambda e, row=row: -row[e])[:4]
        )
    assert unlimited < len(scores)


def test_the_bias_is_stored_in_float32():
    """Its updates of 0.001 vanish next to 1 in bfloat16. Casting a model casts its buffers too."""
    moe = build()
    with torch.device("meta"):
        biased = MoE(moe.router, moe.experts, None, has_bias=True).to(torch.bfloat16)
    biased.init_buffers(torch.device("cpu"))
    assert biased.expert_bias.dtype == torch.float32 and not biased.expert_bias.any()
    assert "expert_bias" in biased.state_dict() and "expert_bias" not in moe.state_dict()


def test_half_precision_routes_by_scores_in_float32():
    """The scores of two experts differ by less than the precision of bfloat16."""
    moe = build(top_k=1, dtype=torch.bfloat16)
    x = torch.full((1, DIM), 1.0, dtype=torch.bfloat16)
    with torch.no_grad():
        moe.router.gate.weight.fill_(-1.0)
        moe.router.gate.weight[4] = 1.0
        moe.router.gate.weight[5] = 1.0
        moe.router.gate.weight[5, 0] = 1.0078125  # 32.0078 rounds to 32 in bfloat16
    weights, expert_ids = moe.router(x)
    assert expert_ids.item() == 5 and weights.dtype == torch.float32


def test_sums_of_half_precision_are_rounded_once():
    generator = torch.Generator().manual_seed(4)
    expert_ids = torch.rand(20, EXPERTS, generator=generator).argsort(-1)
    weights = torch.rand(20, EXPERTS, generator=generator)
    routes = sort_by_expert(expert_ids, weights, EXPERTS)
    rows = torch.randn(20 * EXPERTS, DIM, generator=generator).bfloat16()
    exact = (rows.double()[routes.row_of_slot] * weights.double()[:, :, None]).sum(1)
    error = (combine(rows, routes).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()  # half a unit in the last place of bfloat16


def test_repeated_passes_are_bit_equal():
    moe = build(top_k=4, dtype=torch.float32)
    x, grad = some(dtype=torch.float32), some(dtype=torch.float32, seed=2)
    first, again = (gradients(moe, moe, x, grad) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        pytest.param(torch.float32, 1e-5, marks=pytest.mark.nightly),
        (torch.float64, 1e-13),
        pytest.param(torch.bfloat16, 0.02, marks=pytest.mark.nightly),
    ],
)
def test_the_layer_compiles_as_one_graph_for_any_number_of_tokens(dtype, limit):
    """The kernels are the same. Gradients of a tensor with several uses are summed in another order."""
    torch._dynamo.reset()
    moe = build(dtype=dtype)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for seq in (17, 9):
        x, grad = some(seq=seq, dtype=dtype), some(seq=seq, dtype=dtype, seed=2)
        out, own = gradients(compiled, moe, x, grad)
        expected, reference = gradients(moe, moe, x, grad)
        for value, expected_value in zip((out, *own), (expected, *reference), strict=True):
            assert (value - expected_value).norm() <= limit * expected_value.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_linear_accepts_an_expanded_gradient(dtype):
    """`sum().backward()` gives a gradient without rows in memory."""
    x = torch.randn(20, DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, HIDDEN, DIM, dtype=dtype, requires_grad=True)
    ends = torch.tensor([5, 5, 20], dtype=torch.int32)
    grouped_linear(x, weight, ends).sum().backward()
    expected = torch.cat([weight[0].sum(0).expand(5, -1), weight[2].sum(0).expand(15, -1)])
    # Sums of 16 terms in another order. bfloat16 keeps 8 bits of a sum of magnitude 8 or less.
    limit = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert (x.grad - expected).abs().max() <= limit
    assert weight.grad[1].abs().max() == 0


def grouped_mm_with_garbage(x, weight, offs):
    """`grouped_mm` with nan where kernels may leave memory as it was: after the last group, and in
    products over no rows."""
    out = unpatched_grouped_mm(x, weight, offs=offs)
    if weight.dim() == 3:
        out[offs[-1] :] = torch.nan
    else:
        out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return out


unpatched_grouped_mm = torch.nn.functional.grouped_mm


@pytest.fixture
def product():
    yield select_product
    select_product("auto")


@pytest.mark.parametrize("sizes", [[5, 0, 16, 1], [0, 0, 0, 33], [16, 32, 16, 16], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_products_are_equal(monkeypatch, product, dtype, sizes):
    """The padded product reads nothing that a kernel may leave unwritten."""
    torch.manual_seed(0)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = torch.randn(sum(sizes), DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, HIDDEN, DIM, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, HIDDEN, dtype=dtype, requires_grad=True)
    grad = torch.randn(sum(sizes), HIDDEN, dtype=dtype)

    def outcomes(name):
        product(name)
        y = add_group_bias(grouped_linear(x, weight, ends), bias, ends)
        return [y, *torch.autograd.grad(y, (x, weight, bias), grad)]

    expected = outcomes("loop")
    kernel = outcomes("kernel")
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm_with_garbage)
    limit = 0.02 if dtype == torch.bfloat16 else 1e-5
    for values in (kernel, outcomes("padded")):
        for value, expected_value in zip(values, expected, strict=True):
            assert (value - expected_value).norm() <= limit * expected_value.norm()
