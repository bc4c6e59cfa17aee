"""What torch does before a graph is launched, and what a capture refuses, on the null CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.runner import ROOT

# A replay of a graph with a random operator, next to the eager operator.
REPLAY = """
from typing import Any, NamedTuple
import ctypes, os, torch
from torch.nn import functional as F
from torchtitan_like.distributed.determinism import seed_device
from torchtitan_like.util.cuda_graphs import CapturedPass

class Loss(NamedTuple):
    loss: Any

launches = []
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
library = ctypes.CDLL(os.environ["NULL_CUDA_LIBRARY"])
listener = LISTENER(lambda kind, name: launches.append(name.decode()) if kind == 0 else None)
weight = torch.ones(1000, device="cuda", requires_grad=True)
generator = torch.cuda.default_generators[0]

def compute(x, divide):
    loss = divide(F.dropout(x * weight, 0.5).sum())
    loss.backward()
    {extra}
    return Loss(loss.detach())

captured = CapturedPass(compute, [weight])
for step in range(4):
    weight.grad = None
    x = torch.ones(1000, device="cuda")
    seed_device(100 + step, x.device)
    library.null_cuda_listen(listener if step == 3 else None)
    captured(x, num_valid=3)
    library.null_cuda_listen(None)
    print("offset", generator.initial_seed(), generator.get_offset())
fills = [name for name in launches if "FillFunctorIlEE" in name]
print("launches", len(fills), launches.index("cudaGraphLaunch") > launches.index(fills[-1]))
"""


def run(device: Path, extra: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_PRELOAD": str(device), "NULL_CUDA_LIBRARY": str(device)}
    environment["LD_LIBRARY_PATH"] = str(device.parent)
    command = [sys.executable, "-c", REPLAY.replace("{extra}", extra)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_a_replay_writes_the_seed_and_advances_the_generator(device: Path) -> None:
    """Steps 3 and 4 are a capture and replays. Their kernels read the seed of their own step."""
    done = run(device)
    assert done.returncode == 0, done.stderr
    *offsets, launches = done.stdout.splitlines()
    assert [line.split()[1] for line in offsets] == ["100", "101", "102", "103"]
    assert len({line.split()[2] for line in offsets}) == 1 and offsets[0].split()[2] != "0"
    assert launches == "launches 2 True"  # the seed and the offset, before the graph


def test_a_read_on_the_host_ends_the_capture(device: Path) -> None:
    done = run(device, "loss.item()")
    assert done.stdout.count("offset") == 2, done.stdout  # the two eager steps
    assert "operation not permitted when stream is capturing" in done.stderr
