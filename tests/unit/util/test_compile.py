from types import SimpleNamespace

import torch

from torchtitan_like.util import compile as subject


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
