"""Context parallelism computes the results of one device with the expected communication."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.parity import compare, options, run_cell
from tests.harness.rank_pool import run_ranks
from torchtitan_like.config.sections_scale import ActivationCheckpoint
from torchtitan_like.distributed import context_parallel as context
from torchtitan_like.distributed import ring
from torchtitan_like.distributed.activation import apply_activation_checkpointing
from torchtitan_like.distributed.collectives import gather_whole
from torchtitan_like.distributed.context_parallel import (
    METHODS,
    ContextParallel,
    apply_context_parallel,
)
from torchtitan_like.distributed.initialize import initialize
from torchtitan_like.distributed.parallelize import compile_blocks, find_blocks
from torchtitan_like.models.layers.kernels import KERNELS
from torchtitan_like.models.spec import get_spec, resolve_args

BATCH, HEADS, SEQ, DIM = 2, 4, 64, 16
# Relative L2 error of outputs and gradients. In bfloat16 each rank rounds its partial sum once more
# (measured: at most 7e-3).
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Cell:
    """A case of context-parallel attention. `attn_type`: the kernel; `fault`: a row of FAULTS."""

    method: str = "allgather"
    balancer: str | None = "headtail"
    documents: bool = False
    dtype: torch.dtype = torch.float64
    kv_heads: int = 2
    attn_type: str = "sdpa"
    fault: str = ""

    def __str__(self):
        return "-".join(str(value) for value in vars(self).values() if value not in ("", "sdpa"))


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def document_positions():
    """Return positions of two samples whose documents end within chunks and between them."""
    lengths = [(5, 1, 20, 6, 23, 9), (32, 3, 29)]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def context_parallel(method="allgather", balancer="headtail"):
    return ContextParallel(
        dist.group.WORLD, dist.get_rank(), dist.get_world_size(), method, balancer
    )


def shard_heads(cp, x):
    """Return this rank's shard of (batch, heads, seq, dim), with the strides of a real model."""
    return cp._local_chunks(x.movedim(2, -1)).movedim(-1, 1).contiguous().transpose(1, 2)


def inputs(cell):
    """Return q, k, v and the gradient of the output, equal on all ranks."""
    torch.manual_seed(0)
    heads = (HEADS, cell.kv_heads, cell.kv_heads, HEADS)
    return [torch.randn(BATCH, n, SEQ, DIM, dtype=torch.float64).to(cell.dtype) for n in heads]


def core_and_mask(cell, cp):
    """Return the context-parallel attention core, and its mask for this rank's positions."""
    method, kernel = METHODS[cell.method], KERNELS[cell.attn_type]
    core = method.core(cp, kernel.core)
    if not cell.documents:
        return core, None
    part = cp._local_chunks(document_positions())
    return core, method.mask(cp, kernel.mask)(part, cell.dtype, part.shape[1])


def core_errors(cell):
    """Return the errors of this rank's output and gradients of q, k, v relative to one device."""
    q, k, v, grad = inputs(cell)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    kernel = KERNELS["sdpa"]
    mask = kernel.mask(document_positions(), cell.dtype, SEQ) if cell.documents else None
    expected = kernel.core(*whole, mask)
    expected.backward(grad)

    cp = context_parallel(cell.method, cell.balancer)
    parts = [shard_heads(cp, x).requires_grad_() for x in (q, k, v)]
    with FAULTS[cell.fault]() if cell.fault else mock.patch.dict({}):
        core, mask = core_and_mask(cell, cp)
        actual = core(*parts, mask)
        actual.backward(shard_heads(cp, grad))
    pairs = [
        (actual.detach(), expected.detach()),
        *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True)),
    ]
    return [relative_error(a, shard_heads(cp, b)) for a, b in pairs]


CORES = [
    Cell(method, balancer, documents, dtype, kv_heads)
    for method, balancer in (
        *((m, b) for m in ("allgather", "ring") for b in ("headtail", None)),
        ("ulysses", None),
    )
    for documents in ((False,) if method == "ring" else (False, True))
    for dtype, kv_heads in (
        *((torch.float64, n) for n in (4, 2, 1)),
        (torch.float32, 2),
        (torch.bfloat16, 2),
    )
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("cell", CORES, ids=str)
def test_attention_equals_one_device(cell, num_ranks):
    worst = max(error for errors in run_ranks(core_errors, num_ranks, cell) for error in errors)
    assert worst < TOLERANCES[cell.dtype]


def flex_error(cell):
    q, k, v, _ = inputs(cell)
    kernel, cp = KERNELS["sdpa"], context_parallel(cell.method, cell.balancer)
    expected = kernel.core(q, k, v, kernel.mask(document_positions(), cell.dtype, SEQ))
    core, mask = core_and_mask(cell, cp)
    return relative_error(
        core(*(shard_heads(cp, x) for x in (q, k, v)), mask), shard_heads(cp, expected)
    )


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_context_parallelism_uses_the_model_kernel(method):
    """Only the forward pass: FlexAttention has no backward on CPU."""
    cell = Cell(method, documents=True, attn_type="flex", dtype=torch.float32)
    assert max(run_ranks(flex_error, 2, cell)) < 1e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_ring_attention_equals_full_attention(device, kv_heads):
    """Test the ring's kernels without ranks, on one causal and one full block of keys."""
    cell = Cell(dtype=torch.bfloat16, kv_heads=kv_heads)
    q, k, v, grad = (x.to(device) for x in inputs(cell))
    q, grad = q[:, :, SEQ // 2 :], grad[:, :, SEQ // 2 :].contiguous()
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(HEADS // kv_heads, dim=1) for x in whole[1:]]
    visible = torch.ones(SEQ // 2, SEQ, dtype=torch.bool, device=device).tril(SEQ // 2)
    scores = (whole[0] @ repeated[0].mT / DIM**0.5).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ repeated[1]
    expected.backward(grad.double())

    pieces = [(slice(SEQ // 2, SEQ), True), (slice(0, SEQ // 2), False)]
    out = torch.zeros(q.shape, device=device)
    lse = torch.full(q.shape[:-1], -torch.inf, device=device)
    for rows, causal in pieces:
        part, part_lse, *extras = ring._flash(q, k[:, :, rows], v[:, :, rows], causal=causal)
        ring._merge(out, lse, part, part_lse)
    dq, dk, dv = torch.zeros(q.shape, device=device), torch.empty_like(k), torch.empty_like(v)
    for rows, causal in pieces:
        query_tensors = [grad, q, out.to(q.dtype), lse]
        part, dk[:, :, rows], dv[:, :, rows] = ring._flash_backward(
            query_tensors, k[:, :, rows], v[:, :, rows], extras, causal=causal
        )
        dq += part
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).detach(), rtol=1e-2, atol=1e-2)
    pairs = [(out, expected.detach()), *zip((dq, dk, dv), (x.grad for x in whole), strict=True)]
    assert all(relative_error(a, b) < TOLERANCES[cell.dtype] for a, b in pairs)


# ---- whole models


@dataclass(frozen=True)
class Run:
    """A tiny Llama on some ranks."""

    cp: int = 2
    method: str = "allgather"
    balancer: str | None = "headtail"
    documents: bool = False
    checkpointing: str = "none"
    backend: str = ""
    dtype: torch.dtype = torch.float64

    def __str__(self):
        return "-".join(
            str(value) for value in vars(self).values() if value not in ("", "none", True)
        )


def build(run):
    spec = get_spec("llama3")
    sizes = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 72,
        "max_seq_len": SEQ,
    }
    kind = {"attn_mask_type": "block_causal" if run.documents else "causal"}
    args = resolve_args(spec, "debugmodel", sizes | {"multiple_of": 16} | kind)
    model = spec.build(args).to(run.dtype)
    initialize(model, spec.init_table(args), 7)
    return model, find_blocks(model, spec)


def batch(run):
    torch.manual_seed(1)
    tokens, labels = torch.randint(72, (2, BATCH, SEQ)).unbind()
    labels[0, :9], labels[1, 40:] = -100, -100  # most valid labels are in the first half
    return tokens, labels, document_positions() if run.documents else None


def model_errors(run):
    """Return the relative errors of the loss and of every gradient, after a sum over ranks."""
    tokens, labels, positions = batch(run)
    reference, _ = build(run)
    expected = reference(tokens, labels, positions)
    expected.backward()

    model, blocks = build(run)
    cp = context_parallel(run.method, run.balancer)
    lines = apply_context_parallel(model, cp)
    assert lines == [lines[0]] and f"over {run.cp} ranks, {run.method}" in lines[0]
    if run.checkpointing != "none":
        mode, _, option = run.checkpointing.partition(" ")
        section = ActivationCheckpoint(
            mode=mode, **({"selective_ac_option": option} if option else {})
        )
        apply_activation_checkpointing(blocks, section)
    if run.backend:
        compile_blocks(blocks, run.backend)
    loss = model(*cp.shard(tokens, labels, positions))
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    errors = {"loss": relative_error(total, expected)}
    expected_parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        errors[name] = relative_error(parameter.grad, expected_parameters[name].grad)
    assert len(errors) == 1 + len(expected_parameters)
    return errors


RUNS = [
    *(Run(cp, method) for cp in (2, 4) for method in METHODS),
    *(Run(cp, method, documents=True) for cp in (2, 4) for method in ("allgather", "ulysses")),
    *(Run(method=method, balancer=None) for method in METHODS),
    *(Run(method=method, checkpointing=mode)
      for method in METHODS for mode in ("full", "selective op")),
    *(Run(method=method, checkpointing="selective op", documents=True)
      for method in ("allgather", "ulysses")),
    *(Run(method=method, backend="aot_eager", documents=documents)
      for method in ("allgather", "ulysses") for documents in (False, True)),
    *(Run(method=method, backend="aot_eager", checkpointing="full")
      for method in ("allgather", "ulysses")),
    *(Run(method=method, dtype=torch.float32) for method in METHODS),
]  # fmt: skip
# Of the compiled models, this one runs always and the others nightly.
COMPILED = Run(backend="aot_eager", documents=True)
RUN_CELLS = [
    pytest.param(run, marks=[pytest.mark.nightly] if run.backend and run != COMPILED else [])
    for run in RUNS
]


@pytest.mark.parametrize("run", RUN_CELLS, ids=str)
def test_loss_and_gradients_equal_one_rank(run):
    limit = 1e-10 if run.dtype == torch.float64 else 1e-5
    for errors in run_ranks(model_errors, run.cp, run):
        assert {name: error for name, error in errors.items() if not error < limit} == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("context")


DOCUMENTS = {"model.args.attn_mask_type": "block_causal"}
TRAINED = [
    ("allgather", 2, 1, 2),
    ("ulysses", 2, 1, 2),
    pytest.param("allgather", 4, 2, 2, marks=pytest.mark.nightly),
    pytest.param("ulysses", 4, 2, 2, marks=pytest.mark.nightly),
    pytest.param("allgather", 4, 1, 4, marks=pytest.mark.nightly),
    pytest.param("ulysses", 4, 1, 4, marks=pytest.mark.nightly),
    pytest.param("allgather", 4, 1, 2, marks=pytest.mark.nightly),
    pytest.param("ulysses", 4, 1, 2, marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def trained_on_documents(folder):
    return run_ranks(run_cell, 1, options(str(folder / "one"), "float64", **DOCUMENTS))[0]


@pytest.mark.parametrize(("method", "ranks", "tp", "cp"), TRAINED)
def test_training_on_documents_equals_one_rank(folder, trained_on_documents, method, ranks, tp, cp):
    """Use the whole trainer, with the positions of its data pipeline."""
    degrees = {
        "context_parallel_degree": cp,
        "tensor_parallel_degree": tp,
        "context_parallel_rotate_method": method,
    }
    overrides = {f"parallelism.{key}": value for key, value in degrees.items()} | DOCUMENTS
    overrides["training.local_batch_size"] = 8 * cp * tp // ranks
    name = f"{ranks}-{tp}-{cp}-{method}"
    actual, *_ = run_ranks(run_cell, ranks, options(str(folder / name), "float64", **overrides))
    compare(trained_on_documents, actual, "float64")


def test_document_masks_change_the_loss(folder, trained_on_documents):
    """Without this test, a mask that every layout ignores would pass."""
    (plain,) = run_ranks(run_cell, 1, options(str(folder / "plain"), "float64"))
    assert not math.isclose(plain.loss[0], trained_on_documents.loss[0], rel_tol=1e-6)


# ---- communication and balance of work


class Log(TorchDispatchMode):
    """Records (operator, bytes sent) per message and (queries, keys) per attention call."""

    def __init__(self):
        super().__init__()
        self.sent, self.rectangles = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace in ("_c10d_functional", "c10d") and name not in (
            "wait_tensor",
            "recv_",
        ):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.sent.append((name, sum(x.numel() * x.element_size() for x in tensors)))
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            self.rectangles.append((args[0].shape[2], args[1].shape[2]))
        return function(*args, **(kwargs or {}))


def core_log(cell):
    """Return a rank's messages in forward and in backward, and its (queries, keys) rectangles."""
    cp = context_parallel(cell.method, cell.balancer)
    q, k, v, grad = (shard_heads(cp, x) for x in inputs(cell))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    core, mask = core_and_mask(cell, cp)
    with Log() as forward:
        out = core(q, k, v, mask)
    with Log() as backward:
        out.backward(grad)
    return forward.sent, backward.sent, forward.rectangles


def size(heads, seq, dim=DIM, item=4):
    return BATCH * heads * seq * dim * item


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("balancer", ["headtail", None])
def test_all_gather_sends_keys_and_values_together_and_reduces_gradients(num_ranks, balancer):
    cell = Cell("allgather", balancer, dtype=torch.float32)
    for forward, backward, _ in run_ranks(core_log, num_ranks, cell):
        assert forward == [("all_gather_into_tensor", size(2, SEQ // num_ranks, 2 * DIM))]
        assert backward == [("reduce_scatter_tensor", size(2, SEQ, 2 * DIM))]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize(("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_ring_sends_to_one_neighbor_and_passes_float32_gradients(num_ranks, balancer, dtype, item):
    cell = Cell("ring", balancer, dtype=dtype)
    part = SEQ // num_ranks
    for forward, backward, _ in run_ranks(core_log, num_ranks, cell):
        keys_and_values = ("send", size(2, part, 2 * DIM, item))
        assert forward == [keys_and_values] * (num_ranks - 1)
        gradients = ("send", size(2, part, 2 * DIM, 4))
        assert Counter(backward) == Counter([keys_and_values] * (num_ranks - 1)) + Counter(
            [gradients] * (num_ranks - 1)
        )


@pytest.mark.parametrize(
    ("num_ranks", "kv_heads", "sent_kv_heads"), [(2, 2, 2), (4, 4, 4), (4, 2, 4), (2, 1, 2)]
)
def test_ulysses_exchanges_heads_for_tokens_and_repeats_kv_heads(
    num_ranks, kv_heads, sent_kv_heads
):
    cell, part = Cell("ulysses", dtype=torch.float32, kv_heads=kv_heads), SEQ // num_ranks
    qkv = ("all_to_all_single", size(HEADS + 2 * sent_kv_heads, part))
    output = ("all_to_all_single", size(HEADS, part))
    for forward, backward, _ in run_ranks(core_log, num_ranks, cell):
        assert forward == [qkv, output]
        assert backward == [output, qkv]


def model_log(run):
    model, _ = build(run)
    cp = context_parallel(run.method, run.balancer)
    apply_context_parallel(model, cp)
    part = cp.shard(*batch(run))
    with Log() as log, torch.no_grad():
        model(*part)
    return log.sent


@pytest.mark.parametrize(
    ("method", "num_per_layer", "num_mask_collectives"),
    [("allgather", 1, 0), ("ulysses", 2, 1), ("ring", 1, None)],
)
def test_mask_adds_at_most_one_collective_per_forward(method, num_per_layer, num_mask_collectives):
    plain = run_ranks(model_log, 2, Run(method=method))[0]
    assert len(plain) == 2 * num_per_layer
    if num_mask_collectives is not None:
        masked = run_ranks(model_log, 2, Run(method=method, documents=True))[0]
        positions = [("all_gather_into_tensor", BATCH * SEQ // 2 * 8)] * num_mask_collectives
        assert masked == positions + plain


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_headtail_balances_work_over_ranks(method, num_ranks):
    def work(balancer):
        logs = run_ranks(core_log, num_ranks, Cell(method, balancer, dtype=torch.float32))
        return [sum(queries * keys for queries, keys in rectangles) for *_, rectangles in logs]

    balanced, contiguous = work("headtail"), work(None)
    assert len(set(balanced)) == 1
    # With contiguous chunks the last rank's queries see all keys. Ulysses needs no balancer.
    assert (max(contiguous) > balanced[0]) == (method != "ulysses")


# ---- faults


def _unmerged(out, lse, part, part_lse):
    out.add_(part)
    lse.copy_(part_lse)


FAULTS = {
    "contiguous chunks": lambda: mock.patch.object(
        ContextParallel, "gather", lambda self, x: context.gather_along(x, 2, self.group)
    ),
    "no sum over ranks": lambda: mock.patch.object(context, "gather_along", gather_whole),
    "ends of chunks in order": lambda: mock.patch.object(
        ContextParallel,
        "ends",
        lambda self, seq: [(self.rank * 2 + i + 1) * seq // 2 for i in range(2)],
    ),
    "unmerged": lambda: mock.patch.object(ring, "_merge", _unmerged),
    "all keys seen": lambda: mock.patch.object(
        ring, "_visible", lambda ring, source, seq: (slice(0, seq), slice(0, seq))
    ),
    "nothing arrives": lambda: mock.patch.object(
        ring, "_send_to_next", lambda x, ring: lambda: x.clone()
    ),
    "heads repeated in turn": lambda: mock.patch.object(
        context, "_repeat_heads", lambda x, n: x.repeat(1, n // math.gcd(x.shape[1], n), 1, 1)
    ),
    "only this rank's positions": lambda: mock.patch.object(
        context, "gather_whole", lambda x, dim, group: x.repeat(1, group.size())
    ),
}
FAULTY = [
    Cell(fault="contiguous chunks"),
    Cell(fault="no sum over ranks"),
    Cell(fault="ends of chunks in order"),
    Cell(fault="ends of chunks in order", documents=True),
    Cell("ring", fault="unmerged"),
    Cell("ring", fault="all keys seen"),
    Cell("ring", fault="nothing arrives"),
    Cell("ulysses", fault="heads repeated in turn"),
    Cell("ulysses", fault="only this rank's positions", documents=True),
]


@pytest.mark.parametrize("cell", FAULTY, ids=str)
def test_injected_fault_exceeds_the_tolerance(cell):
    cell = replace(cell, dtype=torch.bfloat16)  # the largest tolerance
    worst = max(error for errors in run_ranks(core_errors, 4, cell) for error in errors)
    assert not worst < TOLERANCES[cell.dtype]
    assert (
        max(max(errors) for errors in run_ranks(core_errors, 4, replace(cell, fault="")))
        < TOLERANCES[cell.dtype]
    )


# ---- sharding of samples


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("balancer", ["headtail", None])
def test_every_token_goes_to_one_rank_with_its_label_and_position(method, balancer, num_ranks):
    tokens = torch.arange(3 * 2 * 16).view(3, 2, 16)
    positions = tokens * 7
    contexts = [ContextParallel(None, r, num_ranks, method, balancer) for r in range(num_ranks)]
    parts = [cp.shard(tokens, -tokens, positions) for cp in contexts]
    for part, labels, shard_positions in parts:
        assert part.shape == (3, 2, 16 // num_ranks) and part.is_contiguous()
        assert torch.equal(labels, -part) and torch.equal(shard_positions, part * 7)
    assert torch.equal(torch.cat([part for part, _, _ in parts], -1).sort().values, tokens)
    without_positions = [cp.shard(tokens, -tokens, None) for cp in contexts]
    assert all(
        torch.equal(shard_positions, part % 16) for part, _, shard_positions in without_positions
    )
    ends = [part[0, 0, :1].tolist() + part[0, 0, -1:].tolist() for part, _, _ in parts]
    is_balanced = balancer == "headtail" and method != "ulysses"
    assert ends[0] == ([0, 15] if is_balanced else [0, 16 // num_ranks - 1])


def test_sizes_that_cannot_be_sharded_are_refused():
    cp = ContextParallel(None, 0, 2)
    with pytest.raises(
        ValueError, match="18 tokens cannot be divided into the 4 equal chunks .* multiple of 4"
    ):
        cp.shard(torch.zeros(1, 18), torch.zeros(1, 18), None)


def test_ring_rejects_document_masks():
    model, _ = build(Run(documents=True))
    with pytest.raises(
        ValueError, match='cannot end attention at document borders: use "allgather" or "ulysses"'
    ):
        apply_context_parallel(model, ContextParallel(None, 0, 2, "ring"))


def test_layers_share_one_attention_core_and_empty_stages_work():
    """A separate core for each layer would recompile the compiled blocks for each layer."""
    model, _ = build(Run())
    apply_context_parallel(model, ContextParallel(None, 0, 2))
    assert len({id(layer.attention.core) for layer in model.layers.values()}) == 1
    apply_context_parallel(torch.nn.Linear(1, 1), ContextParallel(None, 0, 2))
