"""Measure throughput between log lines: tokens/s, MFU, HFU, time spent on data, time to the end.

Checkpoints and validation are pauses. Throughput leaves them out.
The time to the end includes them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torchtitan_like.models.cost import FLOPS_FORMULA
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.memory import MemoryMonitor

MOST_SECONDS = 1e13  # a timedelta cannot hold much more


def log_hardware(
    memory: MemoryMonitor,
    device_type: str,
    override: float | None,
    flops_per_token: float,
) -> float | None:
    """Log the device and the formula of MFU. Return the device's peak in FLOP/s, None if unknown.

    override: `metrics.peak_flops`.
    """
    logger.info(f"{memory.describe()}; memory usage for model: {memory.read().gib:.2f}GiB")
    peak = peak_flops(memory.device_name if device_type == "cuda" else "cpu", override)
    peak_text = f"{peak:.3e} FLOP/s" if peak else "n/a"
    logger.info(
        f"Peak FLOPS used for computing MFU: {peak_text}; "
        f"{flops_per_token / 1e9:.3f} GFLOP per token = {FLOPS_FORMULA}"
    )
    return peak


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of a token, and what one device can do.

    per_token: forward and backward. peak: FLOP/s of one device, None if unknown.
    num_passes: 3, or 4 with full activation checkpointing; only HFU counts the fourth.
    """

    per_token: float
    peak: float | None
    num_passes: float = 3.0

    def rates(self, tps: float) -> dict[str, float]:
        """Return tflops and, if the peak is known, mfu and hfu in percent. tps: per device."""
        rates = {
            "tflops": self.per_token * tps / 1e12,
            "mfu": mfu(self.per_token, tps, self.peak),
            "hfu": hfu(self.per_token, tps, self.peak, self.num_passes),
        }
        return {name: rate for name, rate in rates.items() if rate is not None}


class Progress(NamedTuple):
    """How far a run is, in percent of its steps, and the estimated time to its end."""

    percent: float
    eta: timedelta


@dataclass
class _Interval:
    """The steps since the last log line. started: seconds of the active clock."""

    started: float
    num_steps: int = 0
    num_tokens: int = 0
    data_loading_s: float = 0.0


class ThroughputClock:
    """Measures the steps between two log lines.

    The first step of a process compiles and warms up. It counts only in a log line of its own.

    token_flops: for tflops, MFU and HFU. num_devices: of the whole run.
    data_loading_alarm: fraction of the time above which waiting for data is logged as a warning.
    clock: returns seconds.
    """

    def __init__(
        self,
        token_flops: TokenFlops,
        num_devices: int,
        data_loading_alarm: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.step_seconds = 0.0  # mean of the newest measured interval
        self._token_flops = token_flops
        self._num_devices = num_devices
        self._data_loading_alarm = data_loading_alarm
        self._clock = clock
        self._paused_s = 0.0
        self._interval = _Interval(self._active_time())
        self._measured_at = self._interval.started
        self._num_recorded = 0
        self._first_step_at = 0.0
        self._first_step_active_at = 0.0
        self._is_data_late = False
        self._has_warned_of_mfu = False

    def record(self, num_tokens: int, data_loading_s: float) -> None:
        """Count a step that has just been started on the device."""
        self._num_recorded += 1
        if self._num_recorded == 1:
            self._first_step_at = self._clock()
            self._first_step_active_at = self._active_time()
        elif self._num_recorded == 2 and self._interval.num_steps == 1:
            self._interval = _Interval(self._first_step_active_at)
        self._interval.num_steps += 1
        self._interval.num_tokens += num_tokens
        self._interval.data_loading_s += data_loading_s

    def forget(self, num_tokens: int, data_loading_s: float) -> None:
        """Do not count a recorded step, because it runs again. Its time counts."""
        self._num_recorded -= 1
        self._interval.num_steps -= 1
        self._interval.num_tokens -= num_tokens
        self._interval.data_loading_s -= data_loading_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time inside the block out of throughput, for checkpoints and validation.

        Enter it with an idle device (after a log line or a flush). Otherwise the end of the last
        step is left out as well.
        """
        started = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - started

    def measure(self) -> dict[str, float]:
        """Return means over the steps since the last log line, by their keys in metrics.jsonl.

        Empty if no step was recorded. Token rates are per device.
        """
        interval = self._interval
        self._measured_at = self._active_time()
        seconds = self._measured_at - interval.started
        if interval.num_steps == 0 or seconds <= 0:
            return {}
        # Equals TorchTitan's (tokens of one data rank) / (seconds * cp * tp * pp), because
        # num_tokens is global.
        tps = interval.num_tokens / (seconds * self._num_devices)
        self.step_seconds = seconds / interval.num_steps
        return {
            "tps": tps,
            **self._token_flops.rates(tps),
            "step_s": self.step_seconds,
            "mean_data_loading_s": interval.data_loading_s / interval.num_steps,
            "data_loading_percent": 100.0 * interval.data_loading_s / seconds,
        }

    def start_interval(self) -> None:
        """Start the next interval at the last `measure`. The time to write a log line then counts.

        The first log line imports the packages of its sinks. That is warm-up and does not count.
        """
        is_warmup = self._num_recorded <= 1
        self._interval = _Interval(self._active_time() if is_warmup else self._measured_at)

    def tokens_per_second(self, num_tokens: int, seconds: float) -> float | None:
        """Return tokens per second and device, None if no time has passed."""
        return num_tokens / (seconds * self._num_devices) if seconds > 0 else None

    def progress(self, step: int, last_step: int) -> Progress:
        """Estimate the time to the last step.

        Pauses count. The first step of the process does not.
        """
        num_steps = self._num_recorded - 1
        since = self._first_step_at
        if num_steps == 0:  # the first step is the only measurement
            num_steps = 1
            since = self._interval.started
        num_left = max(0, last_step - step)
        seconds = num_left * (self._clock() - since) / num_steps
        eta = timedelta(seconds=round(min(seconds, MOST_SECONDS)))
        return Progress(100.0 * step / last_step, eta)

    def warn(self, measured: dict[str, float]) -> None:
        """Log a warning each time data starts to come late, and once if MFU is above 100 %.

        measured: of `measure`.
        """
        alarm = self._data_loading_alarm
        percent = measured.get("data_loading_percent", 0.0)
        is_late = self._num_recorded > 1 and percent > 100.0 * alarm
        if is_late and not self._is_data_late:
            logger.warning(
                f"Waiting for data took {percent:.0f}% of the time since the last log line: "
                f"{measured['mean_data_loading_s']:.4f} s of {measured['step_s']:.4f} s per step. "
                "Reading a batch must take no longer than a step. Put the token cache "
                "(data.cache_folder) on a faster disk. The warning starts at a fraction of "
                f"metrics.data_loading_alarm = {alarm}"
            )
        self._is_data_late = is_late
        mfu = measured.get("mfu", 0.0)
        if mfu > 100.0 and not self._has_warned_of_mfu:
            self._has_warned_of_mfu = True
            logger.warning(
                f"MFU is {mfu:.1f}%, which is impossible: check metrics.peak_flops. "
                f"{self._token_flops.peak:.4g} FLOP/s is less than the peak of this device, or the "
                f"{self._token_flops.per_token:.4g} FLOPs per token are too many"
            )

    def _active_time(self) -> float:
        """Return the seconds outside of pauses."""
        return self._clock() - self._paused_s


# ---- floating-point operations


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
