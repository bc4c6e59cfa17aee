"""Seeds and determinism. Randomness is a function of (seed, position), so a resume needs no state."""

from __future__ import annotations

import hashlib
import os
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Debug


def set_determinism(debug: Debug) -> list[str]:
    """Apply `[debug]` determinism and matmul precision before anything is built; return log lines.

    `deterministic` fixes everything that depends on timing: kernels, cuBLAS workspaces, Inductor's
    choices, and NCCL's algorithm and protocol, which determine the order of a sum.
    """
    torch.set_float32_matmul_precision(debug.matmul_precision)
    lines = [f"float32 matmul precision: {debug.matmul_precision}"]
    if debug.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        pinned = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
        if torch.cuda.is_available():
            pinned |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        for name, value in pinned.items():
            os.environ.setdefault(name, value)
        settings = ", ".join(f"{name}={os.environ[name]}" for name in pinned)
        lines.append(f"Deterministic algorithms are on (slower): {settings}")
    return lines


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from any values, equal on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators that a step on `device` uses: torch's CPU generator and the device's.

    `torch.manual_seed` also seeds every other kind of accelerator. For each that is not initialized
    it formats the Python stack: 0.1 ms and about twenty `stat` calls of source files.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, and torch (all devices) equally on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
