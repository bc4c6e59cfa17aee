"""Write and publish one checkpoint.

1. Rank 0 creates a staging folder and checks free space. All ranks check that they see it.
2. Every rank writes and hashes its files.
3. All ranks exchange outcomes and file records. If any rank failed, all raise.
4. Rank 0 checks the sizes on disk, writes `manifest.json`, renames the folder to `step-N`, and
   syncs it. All ranks receive the outcome.
5. Rank 0 deletes expired checkpoints.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.extents import FileRecord, check_sizes, write_file
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.probes import (
    check_space,
    check_writable,
    remove_marker,
    wait_for_marker,
    write_marker,
)
from torchtitan_like.checkpoint.step_folders import publish, write_manifest
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.spec import is_always_float32
from torchtitan_like.util.output import on_screen
from torchtitan_like.util.run_directory import CONFIG, step_name

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.lock import RunLock
    from torchtitan_like.checkpoint.retention import Retention
    from torchtitan_like.config.sections_checkpoint import Checkpoint

logger = logging.getLogger()


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
        lock: RunLock | None,
        retention: Retention | None,
    ) -> None:
        self._section = section
        self._group = group
        self._identity = identity
        self._run_id = run_id
        self._lock = lock
        self._retention = retention
        self._is_folder_shared = False  # True after a successful check

    def commit(
        self,
        save: Save,
        step: int,
        tensors: Mapping[str, Any],
        *,
        config_toml: str,
        summary: Mapping[str, Any],
        on_published: Callable[[Save, Path, float], None],
    ) -> Path:
        """Write and publish `step-N`. If any rank fails, raises CheckpointError on every rank.

        tensors: flat names -> DTensor, tensor, or string.
        summary: additional entries of the manifest.
        on_published: called on rank 0 with the form, the path, and the duration in seconds.
        """
        start_time = time.monotonic()
        final = save.folder / f"{step_name(step)}{save.suffix}"
        staged = save.folder / f"{final.name}.tmp-{self._run_id}"
        if save.dtype is not None and save.kind != "hf":  # an export converts while it writes
            from torchtitan_like.checkpoint.hf.export import warn_of_overflow

            warn_of_overflow(tensors, save.dtype)
            tensors = {name: _as_dtype(name, value, save.dtype) for name, value in tensors.items()}
        try:
            self._group.run_on_leader(lambda: self._stage(save, staged, final, tensors))
            self._check_shared_folder(staged)
            records = self._write_files(save, staged, tensors, config_toml)
            content = {"kind": save.kind, "step": step, "config": config_toml, **summary}
            self._group.run_on_leader(lambda: self._publish(staged, final, records, content))
        except CheckpointError:
            if self._group.rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        seconds = time.monotonic() - start_time
        logger.info(f"Saved {final} ({save.form}) in {seconds:.2f} seconds", extra=on_screen())
        if self._retention is not None:
            try:
                on_published(save, final, seconds)
                self._retention.apply()
            except Exception as error:  # the checkpoint itself is complete
                logger.error(f"Saved {final}, but its event or retention failed: {error}")
        return final

    def _stage(self, save: Save, staged: Path, final: Path, tensors: Mapping[str, Any]) -> None:
        if self._lock is not None:
            self._lock.check()
        if final.exists():
            raise CheckpointError(
                f"{final} exists already. Expected a new step, because a published checkpoint is "
                "never overwritten. Choose another job.dump_folder, or move the folder away"
            )
        staged.mkdir(parents=True)
        needed = sum(_num_bytes(value, save.dtype) for value in tensors.values())
        check_space(staged, needed, 2 * self._group.size + 8)
        check_writable(staged)

    def _check_shared_folder(self, staged: Path) -> None:
        """Check before the first checkpoint that every rank sees the files of rank 0."""
        if self._is_folder_shared:
            return
        token = self._group.run_on_leader(lambda: write_marker(staged))
        self._group.run_on_all(lambda: wait_for_marker(staged, token))
        self._group.run_on_leader(lambda: remove_marker(staged))
        self._is_folder_shared = True

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

        from torchtitan_like.checkpoint.dcp_storage import ExtentWriter

        group = self._group
        writer = ExtentWriter(staged, group.rank)
        detached = {
            name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in tensors.items()
        }
        dcp.save(
            detached, storage_writer=writer, process_group=group.group, no_dist=group.size == 1
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
        records: Mapping[str, FileRecord],
        content: Mapping[str, Any],
    ) -> None:
        check_sizes(staged, records)
        write_manifest(staged, {**content, "files": dict(sorted(records.items()))})
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
