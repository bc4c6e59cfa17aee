"""The chunked loss has the value and gradients of the plain loss, and needs less memory."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.runner import ROOT
from torchtitan_like.models.layers.head import cross_entropy_sum
from torchtitan_like.optim import loss as subject
from torchtitan_like.optim.loss import _softmax_in_tiles, chunked_cross_entropy, sum_by_source

VOCAB, DIM = 4096, 32  # 1 MiB of fp32 logits is 64 tokens


class OpCounter(TorchDispatchMode):
    """Counts matrix products, and records the size of the largest fp32 output."""

    def __init__(self):
        super().__init__()
        self.max_fp32_elements = 0
        self.num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket.__name__ == "mm"
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.max_fp32_elements = max(self.max_fp32_elements, out.numel())
        return out


def make_inputs(tokens=300, dtype=torch.float32, vocab=VOCAB, scale=2.0, ignored=0.2):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, DIM, generator=generator).to(dtype).requires_grad_()
    weight = (
        (scale * torch.randn(vocab, DIM, generator=generator) / DIM**0.5).to(dtype).requires_grad_()
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden, weight, labels


def value_and_gradients(loss, hidden, weight, labels, scale=1.0):
    hidden.grad = weight.grad = None
    value = loss(hidden, weight, labels)
    (value * scale).backward()
    return value.detach(), hidden.grad, weight.grad


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("compile_backend", [None, "eager"], ids=["tiles", "whole chunk"])
@pytest.mark.parametrize(
    ("chunk_mib", "tokens", "dtype", "tolerance"),
    [
        (1, 300, torch.float32, 1e-6),
        (1, 64, torch.float32, 1e-6),
        (1, 65, torch.float32, 1e-6),
        (2, 300, torch.float32, 1e-6),
        (64, 300, torch.float32, 1e-6),
        (0, 300, torch.float32, 1e-6),
        (1, 1, torch.float32, 2e-6),  # one row: both losses are 1e-6 from the exact gradient
        (1, 300, torch.float64, 1e-14),
        (0, 300, torch.float64, 1e-14),
    ],
)
def test_value_and_gradients_equal_plain_cross_entropy(
    chunk_mib, tokens, dtype, tolerance, compile_backend
):
    hidden, weight, labels = make_inputs(tokens, dtype, ignored=0.2 if tokens > 1 else 0)
    loss = chunked_cross_entropy(chunk_mib, compile_backend)
    chunked = value_and_gradients(loss, hidden, weight, labels, scale=0.37)
    plain = value_and_gradients(cross_entropy_sum, hidden, weight, labels, scale=0.37)
    for actual, reference in zip(chunked, plain, strict=True):
        assert actual.dtype == reference.dtype and actual.shape == reference.shape
        assert relative_error(actual, reference) <= tolerance


@pytest.mark.parametrize("compile_backend", [None, "aot_eager"])
@pytest.mark.parametrize("chunk_mib", [1, 0])
def test_token_losses_change_neither_the_sum_nor_its_gradients(chunk_mib, compile_backend):
    hidden, weight, labels = make_inputs(700, torch.float64)
    loss = chunked_cross_entropy(chunk_mib, compile_backend, with_tokens=True)
    per_token = []

    def total(*inputs):
        result = loss(*inputs)
        per_token.append(result.tokens)
        return result.total

    chunked = value_and_gradients(total, hidden, weight, labels)
    plain = value_and_gradients(
        chunked_cross_entropy(chunk_mib, compile_backend), hidden, weight, labels
    )
    assert all(torch.equal(a, b) for a, b in zip(chunked, plain, strict=True))
    expected = F.cross_entropy((hidden @ weight.T).detach(), labels, reduction="none")
    assert not per_token[0].requires_grad
    torch.testing.assert_close(per_token[0], expected, rtol=1e-12, atol=0)
    with torch.no_grad():
        assert torch.equal(loss(hidden, weight, labels).tokens, per_token[0])


def test_token_losses_are_returned_by_a_compiled_loss():
    hidden, weight, labels = make_inputs(100)
    loss = chunked_cross_entropy(1, with_tokens=True)
    compiled = torch.compile(lambda *inputs: loss(*inputs), backend="aot_eager", fullgraph=True)
    expected = loss(hidden, weight, labels)
    result = compiled(hidden, weight, labels)
    assert torch.equal(result.total, expected.total) and torch.equal(result.tokens, expected.tokens)
    chunked = value_and_gradients(lambda *inputs: compiled(*inputs)[0], hidden, weight, labels)
    plain = value_and_gradients(lambda *inputs: loss(*inputs)[0], hidden, weight, labels)
    assert all(relative_error(a, b) <= 1e-6 for a, b in zip(chunked, plain, strict=True))


def test_token_losses_are_summed_by_the_source_of_their_row():
    losses = torch.arange(12, dtype=torch.float32)
    losses[0] = torch.nan
    by_source = sum_by_source(losses, torch.tensor([2, 0, 0, 3]), 5)
    assert by_source.dtype == torch.float64 and by_source[2].isnan()
    assert by_source[[0, 1, 3, 4]].tolist() == [3 + 4 + 5 + 6 + 7 + 8, 0, 9 + 10 + 11, 0]


@pytest.mark.parametrize("vocab", [2048, 32000, 128256])
@pytest.mark.parametrize("chunk_mib", [8, 0])
def test_the_loss_of_bf16_logits_equals_float64_within_1e_6(vocab, chunk_mib):
    """torch's fp32 kernel has a larger error with 128,256 entries."""
    hidden, weight, labels = make_inputs(48, torch.bfloat16, vocab, scale=5.0)
    reference = F.cross_entropy((hidden @ weight.T).double(), labels, reduction="sum")
    loss = chunked_cross_entropy(chunk_mib)
    assert relative_error(loss(hidden, weight, labels).detach(), reference.detach()) <= 1e-6
    with torch.no_grad():
        assert relative_error(loss(hidden, weight, labels), reference) <= 1e-6


def test_the_softmax_of_a_large_vocabulary_is_more_exact_than_torchs():
    """torch's fp32 kernels sum 128,256 numbers sequentially: the error of their softmax is 1e-5."""
    logits = 5 * torch.randn(8, 128256, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8)
    exact = logits.double().log_softmax(-1)
    gradients = exact.exp() - F.one_hot(labels, 128256)
    losses, tiled = _softmax_in_tiles(logits.clone(), labels)
    torch.testing.assert_close(losses.double(), -exact[labels, labels], rtol=2e-7, atol=0)
    gradients[labels, labels] = tiled[labels, labels] = 0  # the others are much smaller
    assert relative_error(tiled, gradients) <= 1e-6
    kernels = logits.softmax(-1)
    kernels[labels, labels] = 0
    assert relative_error(kernels, gradients) > relative_error(tiled, gradients)


def add_in_products(monkeypatch):
    """Let CPU tensors take CUDA's path, with the operators that torch has for CUDA only."""
    mm, addmm = torch.mm, torch.addmm

    def product(a, b, out=None, out_dtype=None):
        return mm(a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype), out=out)

    def added(total, a, b, out_dtype, out):
        return addmm(total, a.to(out_dtype), b.to(out_dtype), out=out)

    monkeypatch.setattr(subject, "_adds_in_product", lambda factor: True)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", added)


class RoundFactors(TorchDispatchMode):
    """Round a factor without dimensions to the dtype of the other one, as CUDA does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mul:
            args = [x.to(args[0].dtype) if torch.is_tensor(x) and x.dim() == 0 else x for x in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "as cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk_mib", [1, 0])
def test_bf16_gradients_are_as_accurate_as_with_the_plain_loss(monkeypatch, chunk_mib, device):
    """The error against float64 on the same bf16 inputs is at most 10 % larger."""
    hidden, weight, labels = make_inputs(300, torch.bfloat16)
    if device == "as cuda":
        add_in_products(monkeypatch)
    else:
        hidden, weight, labels = (
            x.detach().to(device).requires_grad_(x.requires_grad) for x in (hidden, weight, labels)
        )
    with RoundFactors() if device == "as cuda" else contextlib.nullcontext():
        chunked = value_and_gradients(
            chunked_cross_entropy(chunk_mib), hidden, weight, labels, scale=0.37
        )
    plain = value_and_gradients(cross_entropy_sum, hidden, weight, labels, scale=0.37)
    exact = value_and_gradients(
        cross_entropy_sum,
        *(t.detach().double().requires_grad_() for t in (hidden, weight)),
        labels,
        0.37,
    )
    for actual, baseline, reference in zip(chunked, plain, exact, strict=True):
        assert actual.dtype == baseline.dtype
        assert relative_error(actual, reference) <= 1.1 * relative_error(baseline, reference) + 1e-6


@pytest.mark.parametrize("chunk_mib", [1, 0])
def test_loss_and_gradients_are_zero_without_valid_labels(chunk_mib):
    hidden, weight, labels = make_inputs()
    results = value_and_gradients(
        chunked_cross_entropy(chunk_mib), hidden, weight, torch.full_like(labels, -100)
    )
    assert all(torch.equal(x, torch.zeros_like(x)) for x in results)


def test_loss_and_gradients_are_zero_without_tokens():
    hidden, weight, labels = make_inputs(tokens=0)
    value, d_hidden, d_weight = value_and_gradients(
        chunked_cross_entropy(1), hidden, weight, labels
    )
    assert (
        value == 0
        and d_hidden.shape == (0, DIM)
        and torch.equal(d_weight, torch.zeros_like(weight))
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("compile_backend", [None, "eager"])
def test_the_loss_of_non_finite_logits_is_non_finite(value, compile_backend):
    hidden, weight, labels = make_inputs(ignored=0)
    with torch.no_grad():
        hidden[200] = value
    loss = chunked_cross_entropy(1, compile_backend)
    assert not loss(hidden, weight, labels).isfinite()
    with torch.no_grad():
        assert not loss(hidden, weight, labels).isfinite()


def test_logits_of_very_different_size_do_not_overflow():
    hidden, weight, labels = make_inputs(scale=2000.0, ignored=0)
    chunked = value_and_gradients(chunked_cross_entropy(1), hidden, weight, labels)
    plain = value_and_gradients(cross_entropy_sum, hidden, weight, labels)
    for actual, reference in zip(chunked, plain, strict=True):
        assert actual.isfinite().all() and relative_error(actual, reference) <= 1e-6


def test_a_label_outside_the_vocabulary_is_an_error():
    hidden, weight, labels = make_inputs()
    labels[7] = VOCAB
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_cross_entropy(1)(hidden, weight, labels)


def test_a_retained_graph_returns_the_same_gradient_twice():
    hidden, weight, labels = make_inputs()
    loss = chunked_cross_entropy(1)(hidden, weight, labels)
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.5), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1.0))
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("case", "products_per_chunk"),
    [("train", 3), ("frozen weight", 2), ("first layer frozen", 2), ("no grad", 1)],
)
def test_only_required_gradients_are_computed_in_chunks_of_the_requested_size(
    case, products_per_chunk
):
    """300 tokens make 5 chunks of 60 (limit 64). On CPU the fp32 softmax takes 32 at a time."""
    hidden, weight, labels = make_inputs(dtype=torch.bfloat16)
    weight.requires_grad_(case != "frozen weight")
    hidden.requires_grad_(case != "first layer frozen")
    with OpCounter() as counter, torch.set_grad_enabled(case != "no grad"):
        chunked_cross_entropy(1)(hidden, weight, labels)
    assert counter.num_products == 5 * products_per_chunk
    assert counter.max_fp32_elements == (
        32 * VOCAB
        if case != "train" and case != "first layer frozen"
        else max(32 * VOCAB, VOCAB * DIM)
    )


def test_the_loss_of_a_chunk_compiles():
    hidden, weight, labels = make_inputs(tokens=100)
    chunked = value_and_gradients(chunked_cross_entropy(1, "aot_eager"), hidden, weight, labels)
    plain = value_and_gradients(cross_entropy_sum, hidden, weight, labels)
    assert all(relative_error(a, b) <= 1e-6 for a, b in zip(chunked, plain, strict=True))


MEMORY_PROGRAM = """
import torch
from tests.harness.memory import peak_resident_bytes, reset_peak, resident_bytes
from torchtitan_like.models.layers.head import cross_entropy_sum
from torchtitan_like.optim.loss import _softmax_in_tiles, chunked_cross_entropy
loss = {loss}
def run(tokens):
    hidden, weight = (torch.zeros(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, 32000))
    loss(hidden, weight, torch.zeros(tokens, dtype=torch.long)).backward()
run(16)
reset_peak()
before = resident_bytes()
run(2048)
print((peak_resident_bytes() - before) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_chunked_loss_limits_peak_memory():
    """Measure the peak resident memory of forward and backward over 2,048 x 32,000 logits.

    The logits need 125 MiB in bf16 and 250 MiB in fp32. The plain loss holds the logits in bf16,
    then in fp32 together with their log-softmax or its gradient. With chunks of 32 MiB of fp32, the
    loss holds 16 MiB of bf16 logits and 512 KiB of fp32. The rest is scratch memory of bf16 products,
    which depends on the CPU.

    By default glibc raises the size from which it maps memory. It then keeps freed chunks of logits
    in its heap, depending on thread timing. A fixed threshold returns them to the system.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    started = {}
    for loss in ("cross_entropy_sum", "chunked_cross_entropy(32)"):
        program = [sys.executable, "-W", "ignore", "-c", MEMORY_PROGRAM.format(loss=loss)]
        started[loss] = subprocess.Popen(
            program,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    outputs = {loss: process.communicate(timeout=300) for loss, process in started.items()}
    assert all(process.returncode == 0 for process in started.values()), outputs
    peak = {loss: float(stdout) for loss, (stdout, _) in outputs.items()}
    print(f"MiB above the start: {peak}")
    assert peak["cross_entropy_sum"] > 500
    assert peak["chunked_cross_entropy(32)"] < 80
