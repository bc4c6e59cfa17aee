"""The numeric fingerprint decides whether a resume is bit-exact; the log line gives the reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.faults.trainer import ASSETS
from torchtitan_like.checkpoint.fingerprint import compare, numeric_fingerprint, resume_line
from torchtitan_like.checkpoint.step_folders import read_manifest
from torchtitan_like.config import JobConfig


def fingerprint(layout: dict[str, int] | None = None, **changes: Any) -> dict[str, str]:
    """Return the fingerprint of a run on four ranks after `changes` of six relevant sections."""
    names = ("parallelism", "training", "optimizer", "loss", "compile", "resilience")
    kinds = {name: type(getattr(JobConfig(), name)) for name in names}
    config = JobConfig(
        **{
            name: cls(**{key: v for key, v in changes.items() if key in cls.model_fields})
            for name, cls in kinds.items()
        }
    )
    return numeric_fingerprint(
        config, torch.device("cpu"), {"dp_shard": 4} if layout is None else layout
    )


def test_the_same_run_is_bit_exact() -> None:
    assert compare(fingerprint(), fingerprint()) == []
    assert resume_line(fingerprint(), fingerprint()) == "bit-exact: yes"


def test_the_fingerprint_describes_torch_threads_and_layout() -> None:
    actual = fingerprint()
    assert actual["torch"] == torch.__version__
    assert actual["threads"] == str(torch.get_num_threads())
    assert actual["cpu capability"] == torch.backends.cpu.get_cpu_capability()
    assert (actual["layout"], fingerprint(layout={})["layout"]) == ("dp_shard 4", "one rank")
    assert all(isinstance(value, str) and value for value in actual.values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": {"dp_shard": 2}}, "layout dp_shard 4 -> dp_shard 2"),
        ({"local_batch_size": 4}, "micro-batch 8 -> 4"),
        (
            {"mixed_precision_param": "float32"},
            "dtypes float32/bfloat16/float32 -> float32/float32/float32",
        ),
        ({"implementation": "foreach"}, "optimizer AdamW fused -> AdamW foreach"),
        ({"enable_cpu_offload": True}, "optimizer AdamW fused -> AdamW fused on CPU"),
        ({"enable_sequence_parallel": False}, "parallelism none -> enable_sequence_parallel False"),
        (
            {"tensor_parallel_degree": 2, "disable_loss_parallel": True},
            "parallelism none -> disable_loss_parallel True",
        ),
        ({"on_spike": "skip"}, "spikes left out none -> above 8.0 in 128 steps"),
        ({"enable": True}, "compile no -> model, loss by inductor"),
    ],
)
def test_each_relevant_change_is_named(changes: Any, expected: str) -> None:
    assert compare(fingerprint(), fingerprint(**changes)) == [expected]


def test_settings_of_logged_spikes_are_not_compared() -> None:
    assert compare(fingerprint(), fingerprint(spike_threshold=5.0)) == []
    assert compare(fingerprint(), fingerprint(on_spike="skip", spike_threshold=0.0)) == []


def test_every_reason_is_reported() -> None:
    now = fingerprint()
    stored = now | {"torch": "2.0.0", "threads": "64"}
    line = resume_line(stored, now)
    assert line == f"bit-exact: no (torch 2.0.0 -> {now['torch']}; threads 64 -> {now['threads']})"
    assert resume_line(now, now, ["optimizer not loaded"]) == "bit-exact: no (optimizer not loaded)"


def test_the_fingerprint_reads_the_settings_of_this_process() -> None:
    before, threads, precision = (
        fingerprint(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )
    try:
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("medium")
        assert compare(before, fingerprint()) == [
            f"threads {threads} -> {threads + 1}",
            f"matmul precision {precision} -> medium",
        ]
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_a_gpu_is_bit_exact_only_in_deterministic_mode() -> None:
    gpu = fingerprint() | {"device": "NVIDIA H100 80GB HBM3", "NCCL": "2.27.3"}
    assert resume_line(gpu, gpu) == "bit-exact: no (debug.deterministic is false)"
    deterministic = gpu | {"deterministic": "yes"}
    assert resume_line(deterministic, deterministic) == "bit-exact: yes"
    assert compare(gpu, {name: value for name, value in gpu.items() if name != "NCCL"}) == [
        "NCCL 2.27.3 -> none"
    ]


def test_the_keys_of_a_stored_fingerprint_are_those_of_this_version() -> None:
    manifest = read_manifest(ASSETS / "v3/step-3")
    assert manifest is not None
    stored = manifest["numeric"]
    assert stored.keys() == fingerprint().keys()
    assert resume_line(stored, dict(stored)) == "bit-exact: yes"


def test_without_a_fingerprint_bit_exactness_is_unknown() -> None:
    assert resume_line(None, fingerprint()).startswith("bit-exact: unknown")
