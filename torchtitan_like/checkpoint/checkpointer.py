"""When to save, how to commit, how to load. A checkpoint that is visible is complete.

stage -> every rank writes its shards into `step-N.tmp-<id>` with torch DCP -> vote 1 (every rank's outcome) ->
rank 0 writes `manifest.json` -> rename to `step-N` -> fsync -> vote 2 (the outcome is everyone's).
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.checkpoint.start import CheckpointError, Start, decide_start
from torchtitan_like.checkpoint.stateful import Stateful
from torchtitan_like.checkpoint.step_folders import (
    publish,
    remove_stale_stages,
    retain_latest,
    supersede_later,
    write_manifest,
)
from torchtitan_like.distributed.world import HostGroup

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Checkpoint

logger = logging.getLogger()
# One process without a group is a normal way to run, not a mistake to be warned of.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class Checkpointer:
    """Saves and loads the run's state; every method that touches disk is called by all ranks together."""

    def __init__(self, section: Checkpoint, *, dump_folder: str, group: HostGroup, is_leader: bool) -> None:
        self.section = section
        self.folder = Path(dump_folder) / section.folder
        self.group = group
        self.is_leader = is_leader
        # One name for all ranks: they must stage into one folder.
        self.run_id: str = group.broadcast_object(uuid.uuid4().hex[:8])
        self.newest_step = 0  # the last one loaded or saved

    def find_start(self, last_step: int) -> Start:
        """Decide where a run to `last_step` starts. Only rank 0 reads the folder; all get its answer or its error."""
        start: Start = self._leader_does(lambda: decide_start(self.section, self.folder, last_step))
        return start

    def claim(self, start: Start) -> None:
        """Make the folder this run's, once the start is loaded: stale stages go, steps beyond it are renamed."""

        def tidy() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            logger.info(f"Checkpointing active: checkpoints are read from and written to {self.folder}")
            for path in remove_stale_stages(self.folder):
                logger.info(f"Removed the unfinished {path.name}")
            for path in supersede_later(self.folder, start.step, self.run_id):
                logger.warning(f"The run restarts at step {start.step}: a later checkpoint is now {path.name}")

        self.newest_step = start.step
        if self.section.enable:
            self._leader_does(tidy)

    def due(self, step: int, last_step: int) -> bool:
        """Is a save planned after this step?"""
        if not self.section.enable:
            return False
        first = step == 1 and self.section.enable_first_step_checkpoint
        return first or step == last_step or step % self.section.interval == 0

    def save(
        self,
        step: int,
        states: Mapping[str, Stateful],
        *,
        weights_only: bool,
        config_toml: str,
        summary: dict[str, Any],
    ) -> Path:
        """Write and publish `step-N`; raises CheckpointError on every rank when any rank failed.

        Beside the shards stand `config.toml`, which rebuilds the model, and the manifest with `summary`.
        """
        begin = time.monotonic()
        kind = "weights" if weights_only else "full"
        logger.info(f"Saving a {kind} checkpoint of step {step}")
        final = self.folder / f"step-{step}"
        staged = self.folder / f"{final.name}.tmp-{self.run_id}"

        def stage() -> None:
            if final.exists():
                raise FileExistsError(f"{final} exists already: a published checkpoint is never overwritten")
            staged.mkdir(parents=True)
            (staged / "config.toml").write_text(config_toml)

        self._leader_does(stage)
        chosen = {"model": states["model"]} if weights_only else states
        tensors = {f"{key}.{name}": v for key, state in chosen.items() for name, v in state.state_dict().items()}
        try:
            self._write(staged, tensors)
            self._leader_does(lambda: _check_files(staged))
            self._leader_does(lambda: write_manifest(staged, {"kind": kind, "step": step, **summary}))
            self._leader_does(lambda: publish(staged, final))
        except CheckpointError:
            if self.is_leader:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        self._leader_does(lambda: retain_latest(self.folder, self.section.keep_latest_k))
        self.newest_step = step
        logger.info(f"Saved {final} in {time.monotonic() - begin:.2f} seconds")
        return final

    def load(self, start: Start, states: Mapping[str, Stateful]) -> None:
        """Read the checkpoint of `start` into `states`, in place. Raises CheckpointError on every rank."""
        assert start.path is not None
        begin = time.monotonic()
        keys = ["model"] if start.kind == "warm" else [k for k in states if k not in self.section.exclude_from_loading]
        dicts = {key: states[key].state_dict() for key in keys}
        flat = {f"{key}.{name}": value for key, d in dicts.items() for name, value in d.items()}
        self._read(start.path, flat)
        for key in keys:
            states[key].load_state_dict({name: flat[f"{key}.{name}"] for name in dicts[key]})
        left_out = sorted(set(states) - set(keys))
        note = f" (not loaded: {', '.join(left_out)})" if left_out else ""
        logger.info(f"Loaded {start.path} in {time.monotonic() - begin:.2f} seconds{note}")

    def _write(self, staged: Path, tensors: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        # One thread: with more, DCP's writer swallows errors and publishes a checkpoint with holes.
        writer = dcp.FileSystemWriter(staged, thread_count=1, single_file_per_rank=True, sync_files=True)
        detached = {name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in tensors.items()}
        self._all_do(
            lambda: dcp.save(
                detached, storage_writer=writer, process_group=self.group.group, no_dist=self.group.size == 1
            )
        )

    def _read(self, path: Path, tensors: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        reader = dcp.FileSystemReader(path)
        # A vote of its own: a rank that fails here must not leave its peers inside the collectives of dcp.load.
        self._all_do(lambda: _check_entries(path, reader.read_metadata().state_dict_metadata, tensors))
        self._all_do(
            lambda: dcp.load(
                tensors, storage_reader=reader, process_group=self.group.group, no_dist=self.group.size == 1
            )
        )

    def _all_do(self, action: Any) -> None:
        """Run `action` on every rank, then vote: an error of any rank is raised on all, with its rank."""
        from torch.distributed.checkpoint.api import CheckpointException

        error = None
        try:
            action()
        except (Exception, CheckpointException) as problem:  # CheckpointException is no Exception
            error = f"{type(problem).__name__}: {problem}"
        # Vote: nobody goes on before everybody is known to have succeeded.
        errors = self.group.gather_objects(error)
        if any(errors):
            raise CheckpointError("; ".join(f"rank {rank}: {e}" for rank, e in enumerate(errors) if e))

    def _leader_does(self, action: Any) -> Any:
        """Run `action` on rank 0 alone; its result, or its error, is everyone's."""
        result, error = None, None
        if self.is_leader:
            try:
                result = action()
            except Exception as problem:
                error = str(problem) if isinstance(problem, CheckpointError) else f"rank 0: {problem!r}"
        result, error = self.group.broadcast_object((result, error))
        if error:
            raise CheckpointError(error)
        return result


def _check_files(staged: Path) -> None:
    """Every entry of DCP's metadata has its bytes on disk; raises OSError naming what has not."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(staged).read_metadata()
    needed: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        needed[entry.relative_path] = max(needed.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, length in needed.items():
        path = staged / name
        found = path.stat().st_size if path.exists() else 0
        if found < length:
            raise OSError(f"{path} holds {found} of the {length} bytes written to it")


def _check_entries(path: Path, metadata: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """DCP casts dtypes and ignores surplus entries silently; here both are errors, and a missing one is named."""
    prefixes = {name.split(".")[0] for name in wanted}
    problems = [f"{name} is not in the checkpoint" for name in wanted if name not in metadata]
    problems += [
        f"{name} is in the checkpoint but not in this run"
        for name in metadata
        if name not in wanted and name.split(".")[0] in prefixes
    ]
    for name in wanted.keys() & metadata.keys():
        target, stored = wanted[name], metadata[name]
        if not isinstance(target, torch.Tensor):
            continue
        if tuple(stored.size) != tuple(target.shape):
            problems.append(f"{name} has shape {tuple(stored.size)}, this run needs {tuple(target.shape)}")
        elif stored.properties.dtype != target.dtype:
            problems.append(f"{name} is {stored.properties.dtype}, this run needs {target.dtype}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path} does not fit this run: " + "; ".join(problems[:10]) + more)
