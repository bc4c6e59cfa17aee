"""One save from stage to publish: every rank writes, all vote, the manifest commits, the rename shows it.

stage -> visibility, space -> every rank writes and hashes its files -> vote 1 (outcomes and records) -> rank 0 checks the
sizes on disk, writes `manifest.json`, renames to `step-N`, fsyncs -> vote 2 (the outcome is everyone's) -> retention.
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
from torchtitan_like.checkpoint.overflow import warn_of_overflow
from torchtitan_like.checkpoint.probes import (
    check_space,
    check_writable,
    remove_marker,
    wait_for_marker,
    write_marker,
)
from torchtitan_like.checkpoint.step_folders import publish, write_manifest
from torchtitan_like.checkpoint.votes import Votes

if TYPE_CHECKING:
    from torchtitan_like.checkpoint.lock import RunLock
    from torchtitan_like.checkpoint.retention import Retention
    from torchtitan_like.config.sections_scale import Checkpoint

logger = logging.getLogger()


@dataclass(frozen=True)
class Save:
    """What one save is."""

    kind: Literal["full", "weights", "hf"]
    folder: Path  # where its step-N will stand
    dtype: torch.dtype | None = (
        None  # floating-point weights are converted to it; None keeps their own
    )
    is_last: bool = False  # nothing comes after it: it is written in the foreground, and its failure ends the run
    suffix: str = ""  # of the folder's name; with one it is no step that a run starts from

    @property
    def form(self) -> str:
        """The kind, and the type of the weights where it was asked for: what log lines say."""
        return f"{self.kind}, {str(self.dtype).removeprefix('torch.')}" if self.dtype else self.kind


class StepWriter:
    """Writes steps on the checkpoint thread of every rank together. `lock` and `retention` are rank 0's, else None."""

    def __init__(
        self,
        section: Checkpoint,
        votes: Votes,
        identity: Identity,
        run_id: str,
        lock: RunLock | None,
        retention: Retention | None,
    ) -> None:
        self._section, self._votes, self._identity, self._run_id = section, votes, identity, run_id
        self._lock, self._retention = lock, retention
        self._is_visible = False  # to every rank, as far as is known

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
        """Write and publish `step-N`; raises CheckpointError on every rank when any rank failed.

        `tensors`: flat names -> DTensor, tensor or string. `summary` goes into the manifest. `on_published` is told
        what, where and in how many seconds, on rank 0.
        """
        begin = time.monotonic()
        final = save.folder / f"step-{step}{save.suffix}"
        staged = save.folder / f"{final.name}.tmp-{self._run_id}"
        if save.dtype is not None and save.kind != "hf":  # an export converts piece by piece
            warn_of_overflow(tensors, save.dtype)
            tensors = {name: _as_dtype(value, save.dtype) for name, value in tensors.items()}
        try:
            self._votes.leader_does(lambda: self._stage(save, staged, final, tensors))
            self._see_each_other(staged)
            records = self._write_files(save, staged, tensors, config_toml)
            content = {"kind": save.kind, "step": step, "config": config_toml, **summary}
            self._votes.leader_does(lambda: self._publish(staged, final, records, content))
        except CheckpointError:
            if self._votes.is_leader:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        seconds = time.monotonic() - begin
        logger.info(f"Saved {final} ({save.form}) in {seconds:.2f} seconds")
        if self._retention is not None:
            try:
                on_published(save, final, seconds)
                self._retention.apply()
            except Exception as error:  # the step is safe, and the others know: what comes after it must not undo that
                logger.error(f"{final} is saved, but what follows a save has failed: {error}")
        return final

    def _stage(self, save: Save, staged: Path, final: Path, tensors: Mapping[str, Any]) -> None:
        if self._lock is not None:
            self._lock.check()
        if final.exists():
            raise CheckpointError(
                f"{final} exists already: a published checkpoint is never overwritten"
            )
        staged.mkdir(parents=True)
        needed = sum(_num_bytes(value, save.dtype) for value in tensors.values())
        check_space(staged, needed, 2 * self._votes.group.size + 8)
        check_writable(staged)

    def _see_each_other(self, staged: Path) -> None:
        """Before the first save: every rank, on every node, must see what rank 0 has put there."""
        if self._is_visible:
            return
        token = self._votes.leader_does(lambda: write_marker(staged))
        self._votes.all_do(lambda: wait_for_marker(staged, token))
        self._votes.leader_does(lambda: remove_marker(staged))
        self._is_visible = True

    def _write_files(
        self, save: Save, staged: Path, tensors: Mapping[str, Any], config_toml: str
    ) -> dict[str, FileRecord]:
        config = staged / "config.toml"
        records = {
            config.name: self._votes.leader_does(lambda: write_file(config, config_toml.encode()))
        }
        write = (
            partial(self._export, save.dtype or torch.float32)
            if save.kind == "hf"
            else self._write_native
        )
        for part in self._votes.all_do(lambda: write(staged, tensors)):
            records.update(part)
        return records

    def _write_native(self, staged: Path, tensors: Mapping[str, Any]) -> dict[str, FileRecord]:
        import torch.distributed.checkpoint as dcp

        from torchtitan_like.checkpoint.dcp_storage import ExtentWriter

        group = self._votes.group
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
            self._votes,
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
    """What a value of the state takes on disk, its floating-point numbers as `dtype`."""
    if not isinstance(value, torch.Tensor):
        return 0
    is_converted = dtype is not None and value.is_floating_point()
    return value.numel() * (
        dtype.itemsize if dtype is not None and is_converted else value.element_size()
    )


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors converted; integers, bools and everything else as they are."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().to(dtype) if is_float else value
