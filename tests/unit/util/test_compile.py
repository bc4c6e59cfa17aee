from types import SimpleNamespace

import pytest
import torch

from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.util import compile as subject
from torchtitan_like.util.compile import compile_function

DEEPSEEK = get_spec("deepseek_v3")


class Kernel:
    """The parts of Inductor's TritonKernel that the barrier needs."""

    def __init__(self, stored):
        self.cse = SimpleNamespace(invalidated_stores=stored)
        self.body = self
        self.lines = []

    def writeline(self, line):
        self.lines.append(line)

    def load(self, name, index):
        self.writeline(f"tl.load({name} + {index})")


def test_a_barrier_precedes_the_load_of_what_an_earlier_loop_stored():
    load = subject._after_barrier(Kernel.load)
    kernel = Kernel({"buf1"})
    load(kernel, "buf0", 2)
    load(kernel, "buf1", 3)
    assert kernel.lines == ["tl.load(buf0 + 2)", "tl.debug_barrier()", "tl.load(buf1 + 3)"]


def test_inductor_has_what_the_barrier_needs():
    from torch._inductor.codegen.common import CSE, IndentedBuffer

    assert "invalidated_stores" in vars(CSE())
    assert hasattr(IndentedBuffer, "writeline")
    assert isinstance(torch.compiler.config.cache_key_tag, str)


@pytest.mark.gpu
def test_gradients_of_a_compiled_block_of_experts_are_those_of_the_eager_one():
    """Without the barrier the gradient of the block's input is up to 200 times too large."""
    args = resolve_args(DEEPSEEK, "debugmodel", {})
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = DEEPSEEK.build(args).to(torch.bfloat16)
        model.init_buffers(torch.device("cuda"))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(4, 256, args.dim, dtype=torch.bfloat16)
        grad = torch.randn_like(x)
    block = model.layers["1"]

    def gradient(forward):
        leaf = x.clone().requires_grad_()
        forward(leaf).backward(grad)
        return leaf.grad.float()

    expected = gradient(block)
    forward = compile_function(block.forward, fullgraph=True)
    for _ in range(20):
        stale = torch.full((2**24,), 300.0, device="cuda")  # what a thread loads too early
        del stale
        assert (gradient(forward) - expected).norm() < 0.05 * expected.norm()
