"""What the recorder reads from the arguments of operators."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from torchtitan_like.plan.fake import faking
from torchtitan_like.plan.record import Recorder, WorkItem
from torchtitan_like.util import compile as compile_module


def recorded(op: str, recorder: Recorder) -> list[WorkItem]:
    return [item for item in recorder.recording.work if op in item.op]


def test_float8_products_without_fast_accumulation_are_marked() -> None:
    with FakeTensorMode(), Recorder("cpu") as recorder:
        first = torch.empty(32, 64, dtype=torch.float8_e4m3fn)
        second = torch.empty(16, 64, dtype=torch.float8_e4m3fn).t()
        scale = torch.ones(())
        for fast in ({}, {"use_fast_accum": False}, {"use_fast_accum": True}):
            torch._scaled_mm(first, second, scale, scale, out_dtype=torch.bfloat16, **fast)
        torch.empty(4, 4) @ torch.empty(4, 4)
    assert [item.promotes for item in recorded("mm", recorder)] == [True, True, False, False]


def test_causal_attention_is_marked() -> None:
    with FakeTensorMode(), Recorder("cpu") as recorder:
        heads = torch.empty(1, 2, 8, 4)
        for is_causal in (True, False):
            scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal)
    assert [item.is_causal for item in recorded("attention", recorder)] == [True, False]


def test_an_operator_with_a_kernel_of_its_own_is_recorded_as_one() -> None:
    with Recorder("cpu") as recorder:
        x = torch.ones(4, requires_grad=True)
        torch.nn.functional.silu(x).backward(torch.ones(4))
    assert len(recorded("silu_backward", recorder)) == 1


def test_an_operator_of_a_tensor_subclass_is_recorded_as_those_that_it_calls() -> None:
    """A subclass is called below autograd, where `contiguous` is not yet a copy."""
    with FakeTensorMode(), Recorder("cpu") as recorder, torch._C._AutoDispatchBelowAutograd():
        transposed = torch.empty(4, 8).t().contiguous()
        again = transposed.contiguous()
    (copy,) = recorded("", recorder)
    assert copy.op == "clone" and again is transposed
    assert copy.writes == ((recorder.id_of(transposed), 128),)


def test_each_recording_has_the_fused_functions_of_a_process_that_has_compiled_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = compile_module.fused_on_gpu(lambda x: (x + 1) * 2)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(compile_module, "_are_on_gpu", lambda args: True)
        on_gpu.setattr(compile_module, "_can_compile", lambda: True)
        on_gpu.setattr(compile_module, "compile_function", lambda function, options: len)
        assert fused([1, 2]) == 2  # as compiled
    for _ in range(2):
        recorder = Recorder("cpu")
        with faking(recorder, fuses=True) as recording, recording():
            fused(torch.ones(4))
        assert [item.op for item in recorded("", recorder)] == ["ones", "fused <lambda>"]
