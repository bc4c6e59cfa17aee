"""Peak FLOP/s of devices, and model and hardware FLOPs utilization (MFU, HFU).

Peaks are dense bf16 rates of one card in FLOP/s, without structured sparsity, from data sheets.
MFU (Chowdhery et al. 2022, PaLM, appendix B) counts the FLOPs of the model only. HFU also counts
recomputation (Korthikanti et al. 2022, section 6.3).
"""

from __future__ import annotations

import logging
import re

# A key matches a device whose name has all of its words. The key with the most words wins:
# "H100 NVL" before "H100".
PEAK_FLOPS: dict[str, float] = {
    "V100": 125e12,  # fp16: it has no bf16
    "A6000": 154.85e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100": 989e12,  # SXM: its name does not mention the variant
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "B200": 2.25e15,
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "GB300": 2.5e15,
    "MI250": 362e12,
    "MI250X": 383e12,
    "MI300X": 1.3e15,
    "MI325X": 1.3e15,
    "MI355X": 2.5e15,
    "TPU v4": 275e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6e": 918e12,
    "TPU v7": 1153.5e12,
}
# Cards that the runtime shows as several devices, which share the card's peak equally.
DEVICES_PER_CARD = {"MI250": 2, "MI250X": 2}
# Of the bf16 rate, on hardware that has the format (fp8: Hopper, Ada, Blackwell, MI300; tf32:
# NVIDIA since Ampere).
PRECISION_FACTOR = {"bf16": 1.0, "fp8": 2.0, "tf32": 0.5}

_warned: set[str] = set()


def peak_flops(
    device_name: str, override: float | None = None, precision: str = "bf16"
) -> float | None:
    """Return the peak FLOP/s of one device as the runtime counts devices, or None if unknown.

    An unknown device is logged once as a warning, except "cpu", which has no peak.

    override: `metrics.peak_flops`; returned if set. precision: a key of `PRECISION_FACTOR`.
    """
    if override is not None:
        return float(override)
    key = _find(device_name)
    if key is not None:
        return PEAK_FLOPS[key] / DEVICES_PER_CARD.get(key, 1) * PRECISION_FACTOR[precision]
    if device_name.lower() != "cpu" and device_name not in _warned:
        _warned.add(device_name)
        logging.getLogger().warning(
            f"Peak FLOPS of device {device_name!r} are not known: MFU is shown as n/a. "
            "Set metrics.peak_flops to the dense bf16 FLOP/s of one device (for example 989e12)."
        )
    return None


def _find(device_name: str) -> str | None:
    """Return the most specific matching key; None for an unknown device or a MIG slice."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if "mig" in words:
        return None
    keys = [key for key in PEAK_FLOPS if words.issuperset(key.lower().split())]
    # "MI250X / MI250" matches two keys of one word: the larger peak wins.
    return max(keys, key=lambda key: (len(key.split()), PEAK_FLOPS[key]), default=None)


def mfu(flops_per_token: float, tps: float, peak: float | None) -> float | None:
    """Return MFU in percent, `100 * flops_per_token * tps / peak`; None without a peak.

    tps: per device. peak: FLOP/s of one device.
    """
    return None if peak is None else 100.0 * flops_per_token * tps / peak


def hfu(
    flops_per_token: float, tps: float, peak: float | None, num_passes: float = 4.0
) -> float | None:
    """Return HFU in percent, which includes recomputation; None without a peak.

    flops_per_token: of three passes, one forward and a backward of two. num_passes: 3 without
    recomputation (HFU = MFU), 4 with full activation checkpointing, which repeats the forward.
    """
    model = mfu(flops_per_token, tps, peak)
    return None if model is None else model * num_passes / 3.0


def estimate_tflops(
    params_billion: float,
    num_passes: float,
    seq_len: int,
    global_batch_size: int,
    seconds: float,
    num_devices: int,
) -> float:
    """Estimate TFLOP/s per device from 2 FLOPs per parameter, token and pass, without attention.

    `params_B * num_passes * 2 * seq * GBS / (seconds * devices * 1e3)`. 3 passes give model FLOPs,
    4 hardware FLOPs with full recomputation (Megatron-LM, Narayanan et al. 2021).
    """
    return (
        params_billion
        * num_passes
        * 2
        * seq_len
        * global_batch_size
        / (seconds * num_devices * 1e3)
    )


def forward_flops_per_layer(batch_size: int, seq_len: int, dim: int) -> int:
    """Return the FLOPs of one layer's forward, `24 B s h^2 + 4 B s^2 h` (Narayanan et al. 2021).

    For a multi-head layer with a feed-forward of 4 h and attention to all positions.
    """
    return 24 * batch_size * seq_len * dim**2 + 4 * batch_size * seq_len**2 * dim
