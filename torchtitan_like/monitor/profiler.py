"""Profiler traces and snapshots of the CUDA allocator's history, from each rank, every few steps."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.memory import is_out_of_memory
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.run_directory import DATA_WAIT

if TYPE_CHECKING:
    from torchtitan_like.config.sections_run import Profiling

MAX_MEMORY_EVENTS = 100_000

Barrier = Callable[[], None]
Result = TypeVar("Result")


class Profiler:
    """The active profilers of `maybe_profile`. Call `step` once after every training step."""

    def __init__(self, parts: list[_Traces | _MemorySnapshots]) -> None:
        self._parts = parts

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def annotate_data(self, read: Callable[[], Result]) -> Callable[[], Result]:
        """Return `read`, each call of which is a data wait in traces; unchanged without traces."""
        if not any(isinstance(part, _Traces) for part in self._parts):
            return read
        from torch.profiler import record_function

        def annotated() -> Result:
            with record_function(DATA_WAIT):
                return read()

        return annotated


@contextmanager
def maybe_profile(
    section: Profiling,
    run_folder: Path,
    rank: int,
    step: int,
    barrier: Barrier = lambda: None,
    failures: WriteFailures | None = None,
) -> Iterator[Profiler]:
    """Profile the body of the `with` statement by the settings of `[profiling]`.

    Traces are `<run_folder>/<save_traces_folder>/iteration_<step>/rank<rank>_trace.json`. Snapshots
    are `<save_memory_snapshot_folder>/iteration_<step>/rank<rank>_memory_snapshot.pickle`. If the
    GPU runs out of memory, a last snapshot is written into `iteration_<step>_exit`.

    step: the last finished step, 0 for a new run.
    barrier: called after each dump.
    failures: records the dumps that cannot be written.

    If both profilers are disabled, torch's profiler is not imported.
    """
    parts: list[_Traces | _MemorySnapshots] = []
    failures = WriteFailures() if failures is None else failures
    if section.enable_profiling:
        folder = run_folder / section.save_traces_folder
        output = _Output(folder, rank, barrier, failures)
        parts.append(_Traces(section, output, step))
    if section.enable_memory_snapshot and _has_cuda():
        folder = run_folder / section.save_memory_snapshot_folder
        output = _Output(folder, rank, barrier, failures)
        parts.append(_MemorySnapshots(section, output, step))
    error: BaseException | None = None
    try:
        yield Profiler(parts)
    except BaseException as caught:
        error = caught
        raise
    finally:
        for part in parts:
            part.stop(error)


def _has_cuda() -> bool:
    import torch

    if not torch.cuda.is_available():
        logger.warning("profiling.enable_memory_snapshot has no effect: there is no CUDA device")
        return False
    return True


@dataclass(frozen=True)
class _Output:
    """The files of one rank in `folder`, and what follows a dump: see `maybe_profile`."""

    folder: Path
    rank: int
    barrier: Barrier
    failures: WriteFailures

    def file(self, name: str, suffix: str) -> Path:
        return self.folder / name / f"rank{self.rank}_{suffix}"


class _Traces:
    """torch.profiler in cycles: idle steps, `profiler_warmup` steps, `profiler_active` recorded steps."""

    def __init__(self, section: Profiling, output: _Output, step: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        self._output = output
        self._step = step
        active, warmup = section.profiler_active, section.profiler_warmup
        cycle = schedule(wait=section.profile_freq - active - warmup, warmup=warmup, active=active)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        logger.info(f"Profiling active. Traces will be saved at {output.folder}")
        # torch warns that each cycle clears the events of the one before. They are on disk by then.
        warnings.filterwarnings(
            "ignore", message=".*Profiler clears events at the end of each cycle"
        )
        self._profile: Any = profile(
            activities=activities,
            # Counted from the first step of the run, so that a resumed run records the same steps.
            schedule=lambda index: cycle(index + step),
            on_trace_ready=self._dump,
            record_shapes=True,
            with_stack=section.with_stack,
        )
        self._profile.start()

    def step(self) -> None:
        self._step += 1
        self._profile.step()

    def stop(self, error: BaseException | None) -> None:
        # An incomplete cycle is not dumped, and after an error the barrier would hang.
        self._profile.on_trace_ready = None
        self._profile.stop()

    def _dump(self, profile: Any) -> None:
        path = self._output.file(f"iteration_{self._step}", "trace.json")
        started = time.perf_counter()
        with self._output.failures.recording(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
            _check_end(path)
            seconds = time.perf_counter() - started
            logger.info(
                f"Finished dumping profiler traces at step {self._step} in {seconds:.2f} seconds"
            )
        self._log_times(profile)
        self._output.barrier()  # all ranks dump at this step; none starts the next one before all have written

    def _log_times(self, profile: Any) -> None:
        from torchtitan_like.monitor.step_times import mean_times, read_events

        times = mean_times(read_events(profile))
        if times is not None:
            logger.info(
                f"Profile at step {self._step}, mean of a step: compute {times.compute:.2f} ms, "
                f"exposed communication {times.exposed:.2f} ms, data wait {times.data_wait:.2f} ms, "
                f"idle {times.idle:.2f} ms"
            )


class _MemorySnapshots:
    """The CUDA allocator's history, dumped every `profile_freq` steps, for pytorch.org/memory_viz."""

    def __init__(self, section: Profiling, output: _Output, step: int) -> None:
        import torch

        self._memory = torch.cuda.memory
        self._output = output
        self._step = step
        self._freq = section.profile_freq
        logger.info(f"Memory profiler active. Snapshots will be saved at {output.folder}")
        self._memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)

    def step(self) -> None:
        self._step += 1
        if self._step % self._freq == 0:
            self._dump(f"iteration_{self._step}")
            self._output.barrier()  # as for traces

    def stop(self, error: BaseException | None) -> None:
        if error is not None and is_out_of_memory(error):
            self._dump(f"iteration_{self._step}_exit")
        self._memory._record_memory_history(enabled=None)

    def _dump(self, name: str) -> None:
        path = self._output.file(name, "memory_snapshot.pickle")
        started = time.perf_counter()
        with self._output.failures.recording(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(path))
            seconds = time.perf_counter() - started
            logger.info(f"Finished dumping memory snapshot {path} in {seconds:.2f} seconds")


def _check_end(trace: Path) -> None:
    """Raise OSError if a trace is truncated: Kineto does not report failed writes."""
    with open(trace, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(errno.EIO, "the profiler's trace is truncated", str(trace))
