from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_a_function_may_have_many_graphs():
    """Blocks are compiled for each capacity of bounded buffers, without a break in their graphs."""
    torch._dynamo.reset()
    scale = subject.compile_function(lambda x, by: x * by, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(specialize_float=True):
        for number in range(10):
            assert scale(torch.ones(()), 1.0 + number / 2) == 1.0 + number / 2


@pytest.fixture
def compilations(monkeypatch):
    """Let CPU tensors stand for those on a GPU; return a counter of compiled graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(subject, "_are_on_gpu", lambda args: True)
    monkeypatch.setattr(subject, "_can_compile", lambda: True)
    compiled = cache(lambda function: torch.compile(function, backend=counter))
    monkeypatch.setattr(subject, "_compiled", compiled)
    yield counter
    torch._dynamo.reset()


def gather_and_scale(rows, index, weights):
    picked = rows.index_select(0, index)
    return picked if weights is None else picked * weights[:, None]


def test_a_fused_function_compiles_twice_for_any_number_of_rows(compilations):
    fused = subject.fused_on_gpu(gather_and_scale)
    assert fused.__name__ == "gather_and_scale" and compilations.frame_count == 0
    for num_rows in (8, 8, 12, 5, 9, 20, 31):
        rows, weights = torch.randn(num_rows + 3, 4), torch.randn(num_rows)
        index = torch.randint(num_rows + 3, (num_rows,))
        assert torch.equal(fused(rows, index, weights), gather_and_scale(rows, index, weights))
    assert compilations.frame_count == 2


def test_a_fused_function_is_part_of_the_graph_of_its_caller(compilations):
    fused = subject.fused_on_gpu(gather_and_scale)
    caller = torch.compile(lambda *args: fused(*args) + 1, backend=compilations, fullgraph=True)
    rows, index = torch.randn(5, 4), torch.tensor([3, 0])
    assert torch.equal(caller(rows, index, None), rows[index] + 1)
    assert compilations.frame_count == 1


def test_a_fused_function_compiles_in_the_thread_of_a_backward(compilations):
    fused = subject.fused_on_gpu(gather_and_scale)
    rows, index = torch.randn(5, 4), torch.tensor([3, 0])
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(fused, rows, index, None).result()
    assert torch.equal(result, rows[index]) and compilations.frame_count == 1


@pytest.mark.parametrize(
    "rows",
    [
        torch.randn(5, 4),
        nn.Parameter(torch.randn(5, 4)),
        torch.randn(5, 4, device="meta"),
        FakeTensorMode().from_tensor(torch.randn(5, 4)),
    ],
    ids=["cpu", "parameter", "meta", "fake"],
)
def test_tensors_that_are_not_on_a_gpu_never_import_the_compiler(rows, monkeypatch):
    monkeypatch.setattr(subject, "compile_function", pytest.fail)
    fused = subject.fused_on_gpu(lambda rows: rows.sum(1))
    assert fused(rows).shape == (5,)


@pytest.mark.parametrize(
    ("has_triton", "has_compiler", "message"),
    [
        (True, True, None),
        (False, True, "Triton does not support this GPU"),
        (True, False, "there is no C compiler"),
    ],
)
def test_kernels_are_not_fused_where_triton_cannot_run(
    has_triton, has_compiler, message, monkeypatch, caplog
):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: has_triton)
    monkeypatch.setattr("shutil.which", lambda name: name if has_compiler else None)
    assert subject._can_compile.__wrapped__() == (message is None)
    assert (message or "") in caplog.text and bool(caplog.text) == bool(message)
