"""Activation offload: what it copies to host memory, and when it frees the copies."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_like.distributed import activation_offload
from torchtitan_like.distributed.activation_offload import ActivationOffload
from torchtitan_like.util.units import GIB

ROWS, DIM = 32, 64
ACTIVATION = ROWS * DIM * 4  # bytes


class Block(nn.Module):
    """Backward needs three storages: x, the result of exp, and second(x)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.second = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("scale", torch.full((ROWS, DIM), 2.0))
        self.storages = []

    def forward(self, x):
        hidden = self.first(x) * self.scale
        grown = hidden.exp()
        self.storages += [StorageWeakRef(t.untyped_storage()) for t in (hidden, grown)]
        return grown * self.second(x)


def run(block, x):
    """Return the gradients, and which of the block's tensors were alive before backward."""
    out = block(x)
    alive = [not storage.expired() for storage in block.storages]
    out.sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())], alive


def build(offload=None):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(ROWS, DIM, requires_grad=True)
    if offload is not None:
        offload.apply([block])
    return block, x


def test_activations_leave_the_device_without_changing_gradients():
    expected, alive = run(*build())
    assert alive == [False, True]  # autograd keeps the result of exp
    offload = ActivationOffload()
    gradients, alive = run(*build(offload))
    assert alive == [False, False]
    for actual, reference in zip(gradients, expected, strict=True):
        assert torch.equal(actual, reference)
    # x, the result of exp, and second(x). No weights and no buffers.
    assert offload.peak_bytes == 3 * ACTIVATION
    assert offload.num_bytes == 0  # freed by the backward pass


def test_a_shared_storage_is_copied_back_once(monkeypatch):
    reads = []
    copy_ = torch.Tensor.copy_

    def counted(target, source, *args, **kwargs):
        reads.append(source.numel())
        return copy_(target, source, *args, **kwargs)

    block, x = build(ActivationOffload())
    out = block(x)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    out.sum().backward()
    assert reads == [ACTIVATION] * len(reads)
    assert len(reads) <= 4  # x, the result of exp, second(x). One may be freed between two uses


def test_strides_are_kept():
    """A product can round differently if its operands have other strides."""
    saved = []
    offload = ActivationOffload()

    class Transposing(nn.Module):
        def forward(self, x):
            return x.t().exp().t()[:, ::2]

    class SaveInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            saved.extend(ctx.saved_tensors)
            return grad

    block = Transposing()
    inner = block.forward
    block.forward = lambda x: SaveInput.apply(inner(x))
    offload.apply([block])
    x = torch.randn(ROWS, DIM, requires_grad=True)
    block(x).sum().backward()
    expected = inner(x)
    assert saved[0].stride() == expected.stride()
    assert torch.equal(saved[0], expected)


def test_saved_tensors_can_be_read_twice():
    """Zero-bubble schedules compute input gradients first and weight gradients later."""
    expected, _ = run(*build())
    block, x = build(ActivationOffload())
    out = block(x).sum()
    (input_gradient,) = torch.autograd.grad(out, [x], retain_graph=True)
    weight_gradients = torch.autograd.grad(out, list(block.parameters()))
    for actual, reference in zip([input_gradient, *weight_gradients], expected, strict=True):
        assert torch.equal(actual, reference)


def test_an_in_place_change_does_not_affect_saved_tensors():
    class Changing(nn.Module):
        def forward(self, x):
            y = x * 1.0
            first = y.sin()
            y.mul_(2.0)
            return first + y.cos()

    block, offload = Changing(), ActivationOffload()
    x = torch.randn(ROWS, DIM, requires_grad=True)
    offload.apply([block])
    block(x).sum().backward()
    expected = x.detach().cos() - 2 * (2 * x.detach()).sin()
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-6)


def test_a_block_takes_keyword_arguments():
    offload = ActivationOffload()
    block, x = build(offload)
    block(x=x)
    assert offload.peak_bytes == 3 * ACTIVATION


def test_nothing_is_copied_without_gradients():
    offload = ActivationOffload()
    block, x = build(offload)
    with torch.no_grad():
        block(x)
    assert offload.peak_bytes == 0


def test_too_little_host_memory_ends_the_first_step(monkeypatch):
    monkeypatch.setattr(activation_offload, "available_bytes", lambda: 2 * ACTIVATION)
    block, x = build(ActivationOffload(local_ranks=2))
    block(x)
    block, x = build(ActivationOffload(local_ranks=3))
    with pytest.raises(MemoryError, match="each of 3 ranks. Available on this node: 0.00 GiB"):
        block(x)
    measured = ActivationOffload(local_ranks=3)
    measured.checks_memory = False
    block, x = build(measured)
    block(x)
    assert GIB == 2**30
