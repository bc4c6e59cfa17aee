"""Measure throughput between log lines: tokens/s, MFU, HFU, time spent on data, time to the end.

Checkpoints and validation are pauses. Throughput leaves them out.
The time to the end includes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torchtitan_like.monitor import flops
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.memory import MemoryMonitor

MOST_SECONDS = 1e13  # a timedelta cannot hold much more


def log_hardware(
    memory: MemoryMonitor,
    device_type: str,
    override: float | None,
    flops_per_token: float,
    formula: str,
) -> float | None:
    """Log the device and the formula of MFU. Return the device's peak in FLOP/s, None if unknown.

    override: `metrics.peak_flops`. formula: of `flops_per_token`.
    """
    logger.info(f"{memory.describe()}; memory usage for model: {memory.read().gib:.2f}GiB")
    peak = flops.peak_flops(memory.device_name if device_type == "cuda" else "cpu", override)
    peak_text = f"{peak:.3e} FLOP/s" if peak else "n/a"
    logger.info(
        f"Peak FLOPS used for computing MFU: {peak_text}; "
        f"{flops_per_token / 1e9:.3f} GFLOP per token = {formula}"
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
            "mfu": flops.mfu(self.per_token, tps, self.peak),
            "hfu": flops.hfu(self.per_token, tps, self.peak, self.num_passes),
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
