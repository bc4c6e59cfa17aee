"""Write and publish one checkpoint.

1. Rank 0 creates a staging folder and checks free space. All ranks check that they see it.
2. Every rank writes and hashes its files.
3. All ranks exchange outcomes and file records. If any rank failed, all raise.
4. Rank 0 checks the sizes on disk, writes `manifest.json`, renames the folder to `step-N`, and
   syncs it. All ranks receive the outcome.
5. Rank 0 deletes expired checkpoints.

`StepWriter.commit` does this on the `CheckpointThread` of every rank. In the background, it writes
the copy of the state that `HostCopy` holds.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.step_folders import Retention, write_manifest
from torchtitan_like.checkpoint.verification import check_sizes
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.spec import is_always_float32
from torchtitan_like.util.extents import FileRecord, write_file
from torchtitan_like.util.files import publish, refuse_existing
from torchtitan_like.util.locks import FileLock
from torchtitan_like.util.output import on_screen
from torchtitan_like.util.run_directory import CONFIG, step_name
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    from torchtitan_like.config.sections_checkpoint import Checkpoint

T = TypeVar("T")
logger = logging.getLogger()

_OVERHEAD_FACTOR = 1.02  # of the file system
_RESERVED_BYTES = 64 * 2**20  # for the run's other files


@dataclass(frozen=True)
class Save:
    """The form of one checkpoint to save."""

    kind: Literal["full", "weights", "hf"]
    folder: Path  # the parent folder of step-N
    dtype: torch.dtype | None = None  # of floating-point weights; None keeps their dtype
    is_last: bool = False  # written in the foreground; an error ends the run
    suffix: str = ""  # of the folder's name; a run never starts from a step with a suffix

    @property
    def form(self) -> str:
        """The kind and the requested dtype, for log lines."""
        return f"{self.kind}, {str(self.dtype).removeprefix('torch.')}" if self.dtype else self.kind


@dataclass(frozen=True)
class RunRecord:
    """What a manifest stores of the run after a step."""

    step: int
    config_toml: str
    summary: Mapping[str, Any]  # the manifest's other entries


# Called on rank 0 with the step, its form, its path, and the duration in seconds.
OnPublished = Callable[[int, Save, Path, float], None]


class StepWriter:
    """Writes steps. Runs on the checkpoint threads of all ranks together.

    `lock` and `retention` are None on all ranks except rank 0.
    """

    def __init__(
        self,
        section: Checkpoint,
        group: HostGroup,
        identity: Identity,
        run_id: str,
        lock: FileLock | None,
        retention: Retention | None,
    ) -> None:
        self.on_published: OnPublished = lambda *_: None
        self._section = section
        self._group = group
        self._identity = identity
        self._run_id = run_id
        self._lock = lock
        self._retention = retention

    def commit(self, save: Save, record: RunRecord, tensors: Mapping[str, Any]) -> Path:
        """Write and publish `step-N`. If any rank fails, raises CheckpointError on every rank.

        tensors: flat names -> DTensor, tensor, or string.
        """
        start_time = time.monotonic()
        final = save.folder / f"{step_name(record.step)}{save.suffix}"
        staged = save.folder / f"{final.name}.tmp-{self._run_id}"
        if save.dtype is not None and save.kind != "hf":  # an export converts while it writes
            from torchtitan_like.checkpoint.hf.export import warn_of_overflow

            warn_of_overflow(tensors, save.dtype)
            tensors = {name: _as_dtype(name, value, save.dtype) for name, value in tensors.items()}
        try:
            self._group.run_on_leader(lambda: self._stage(save, staged, final, tensors))
            # The name is random: a rank that sees the folder shares a file system with rank 0.
            self._group.run_on_all(lambda: wait_until_visible(staged))
            files = self._write_files(save, staged, tensors, record.config_toml)
            manifest = {
                "kind": save.kind,
                "step": record.step,
                "config": record.config_toml,
                **record.summary,
            }
            self._group.run_on_leader(lambda: self._publish(staged, final, files, manifest))
        except CheckpointError:
            if self._group.rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        seconds = time.monotonic() - start_time
        logger.info(f"Saved {final} ({save.form}) in {seconds:.2f} seconds", extra=on_screen())
        if self._retention is not None:
            try:
                self.on_published(record.step, save, final, seconds)
                self._retention.apply()
            except Exception as error:  # the checkpoint itself is complete
                logger.error(f"Saved {final}, but its event or retention failed: {error}")
        return final

    def _stage(self, save: Save, staged: Path, final: Path, tensors: Mapping[str, Any]) -> None:
        if self._lock is not None:
            self._lock.check()
        refuse_existing(final)
        staged.mkdir(parents=True)
        needed = sum(_num_bytes(value, save.dtype) for value in tensors.values())
        check_space(staged, needed, 2 * self._group.size + 8)
        check_writable(staged)

    def _write_files(
        self, save: Save, staged: Path, tensors: Mapping[str, Any], config_toml: str
    ) -> dict[str, FileRecord]:
        config = staged / CONFIG
        records = {
            config.name: self._group.run_on_leader(lambda: write_file(config, config_toml.encode()))
        }
        write = (
            partial(self._export, save.dtype or torch.float32)
            if save.kind == "hf"
            else self._write_native
        )
        for part in self._group.gather_objects(
            self._group.run_on_all(lambda: write(staged, tensors))
        ):
            records.update(part)
        return records

    def _write_native(self, staged: Path, tensors: Mapping[str, Any]) -> dict[str, FileRecord]:
        import torch.distributed.checkpoint as dcp

        from torchtitan_like.checkpoint.dcp_storage import BalancedSavePlanner, ExtentWriter

        group = self._group
        writer = ExtentWriter(staged, group.rank)
        detached = {
            name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in tensors.items()
        }
        dcp.save(
            detached,
            storage_writer=writer,
            planner=BalancedSavePlanner(),
            process_group=group.group,
            no_dist=group.size == 1,
        )
        return writer.records

    def _export(
        self, dtype: torch.dtype, staged: Path, tensors: Mapping[str, Any]
    ) -> dict[str, FileRecord]:
        from torchtitan_like.checkpoint.hf.folder import write_model

        return write_model(
            staged,
            {name.removeprefix("model."): value.detach() for name, value in tensors.items()},
            self._identity,
            self._group,
            dtype=dtype,
            shard_bytes=round(self._section.hf_shard_gb * 1e9),
        )

    def _publish(
        self,
        staged: Path,
        final: Path,
        files: Mapping[str, FileRecord],
        manifest: Mapping[str, Any],
    ) -> None:
        check_sizes(staged, files)
        write_manifest(staged, {**manifest, "files": dict(sorted(files.items()))})
        if self._lock is not None:
            self._lock.check()
        publish(staged, final)


def _num_bytes(value: Any, dtype: torch.dtype | None) -> int:
    """Return the size of a value on disk, with floating-point tensors converted to `dtype`."""
    if not isinstance(value, torch.Tensor):
        return 0
    is_converted = dtype is not None and value.is_floating_point()
    return value.numel() * (
        dtype.itemsize if dtype is not None and is_converted else value.element_size()
    )


def _as_dtype(name: str, value: Any, dtype: torch.dtype) -> Any:
    """Convert floating-point tensors to `dtype`. Returns all other values unchanged."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().to(dtype) if is_float and not is_always_float32(name) else value


# ---- checks before a checkpoint is written


def check_space(folder: Path, needed_bytes: int, needed_files: int = 0) -> None:
    """Raise CheckpointError if the file system of `folder` has no room for a checkpoint."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    needed = needed_bytes * _OVERHEAD_FACTOR + _RESERVED_BYTES
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free / GIB:.2f} GiB free. Expected {needed / GIB:.2f} GiB for a "
            "checkpoint. Free some space, lower checkpoint.keep_latest_k, or choose another "
            "job.dump_folder"
        )
    if stat.f_files and stat.f_favail < needed_files:
        raise CheckpointError(
            f"{folder} has room for {stat.f_favail:,} more files (inodes). Expected "
            f"{needed_files:,} for a checkpoint. Remove some files, or choose another "
            "job.dump_folder"
        )


def check_writable(folder: Path) -> None:
    """Write, read, and remove a small file. Raises CheckpointError if that fails."""
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    token = uuid.uuid4().bytes
    try:
        with open(probe, "wb") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        content = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"No checkpoint can be written to {folder}: {error}. Expected a writable folder. Check "
            "its owner, quota, and free space, or choose another job.dump_folder"
        ) from error
    if content != token:
        raise CheckpointError(
            f"A file in {folder} changed after it was written: its file system is faulty. Expected "
            "to read the bytes that were written. Choose another job.dump_folder"
        )


def wait_until_visible(path: Path, patience: float = 10, sleep: Any = time.sleep) -> None:
    """Wait until this rank sees a file or folder that rank 0 has created.

    Shared file systems show a new file on other nodes after a delay. Raises CheckpointError if it
    does not appear for `patience` seconds.
    """
    for _ in range(round(10 * patience) + 1):
        with suppress(OSError):
            if path.exists():
                return
        sleep(0.1)
    raise CheckpointError(
        f"{path.parent} on {socket.gethostname()} is not the folder that rank 0 sees: {path.name} "
        f"did not appear within {patience:.0f} s. Expected a file system that all nodes share. Set "
        "job.dump_folder to a shared folder"
    )


# ---- what a background checkpoint needs


class CheckpointThread:
    """Runs submitted calls one after the other. All ranks must submit them in the same order.

    A daemon thread, so that a crashing process does not wait for peers that are dead.
    """

    def __init__(self, device: torch.device, at_start: Callable[[], None]) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()
        self.run(at_start)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue `call` and return its future."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def run(self, call: Callable[[], T]) -> T:
        """Run `call` after all queued calls, and wait for its result."""
        return self.submit(call).result()

    def close(self) -> None:
        """End the thread after all queued calls."""
        self._calls.put(None)

    @torch.no_grad()
    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # DCP raises a BaseException
                future.set_exception(error)
            del item, call, future  # free the state that they may reference


class HostCopy:
    """One reusable set of host buffers for the state of a step.

    With `pinned` and a GPU, copies run on a separate stream during the next forward and backward.
    Call `order_updates` before the weights change. Otherwise `copy` is synchronous.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, torch.Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state` with every tensor copied to host memory. DTensors keep their layout.

        Overwrites the buffers of the last copy, so its checkpoint must be complete.
        """
        on_gpu = any(
            isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in state.values()
        )
        if not (self._pinned and on_gpu):
            return {name: self._copy_of(name, value, pinned=False) for name, value in state.items()}
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = {
                name: self._copy_of(name, value, pinned=True) for name, value in state.items()
            }
            self._event = self._stream.record_event()
        return copies

    def order_updates(self) -> None:
        """Make the current stream wait for the copies. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Block until the copies are complete. Any number of threads may call it."""
        if self._event is not None:
            self._event.synchronize()

    @torch.no_grad()
    def _copy_of(self, name: str, value: Any, *, pinned: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        local = getattr(value, "_local_tensor", value)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(
                local.shape, dtype=local.dtype, pin_memory=pinned and local.is_cuda
            )
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=pinned)
        if local is value:
            return buffer
        from torch.distributed.tensor import DTensor

        # `from_local` would move the buffer back to the mesh's device.
        return DTensor(buffer, value._spec, requires_grad=False)  # type: ignore[attr-defined]
