"""Save, load, and clean up the checkpoints of a run. Every visible checkpoint is complete.

The checkpoint thread (`CheckpointThread`) does all work on disk, in the same order on every rank. In
the foreground, the trainer waits for it. In the background (`checkpoint.async_mode`), the thread
works on a copy of the state while training continues.
"""

from __future__ import annotations

import logging
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchtitan_like.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    with_checkpoint_errors,
)
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.loading import load_states, load_stored_weights
from torchtitan_like.checkpoint.saving import (
    CheckpointThread,
    HostCopy,
    OnPublished,
    RunRecord,
    Save,
    StepWriter,
)
from torchtitan_like.checkpoint.start import Start, decide_start
from torchtitan_like.checkpoint.stateful import Stateful
from torchtitan_like.checkpoint.step_folders import (
    HF_EXPORTS,
    MANIFEST_OWN_KEYS,
    NONFINITE,
    Retention,
    newest_before,
    pin_before,
    remove_stale_stages,
    stale_stages,
    supersede_later,
)
from torchtitan_like.checkpoint.stored_weights import EMA_KEY
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.locks import FileLock, LockedError, run_lock
from torchtitan_like.util.run_directory import PIN, step_name

if TYPE_CHECKING:
    from torchtitan_like.config.sections_checkpoint import Checkpoint

T = TypeVar("T")
logger = logging.getLogger()
# One process without a group is a normal way to run, not a mistake to be warned of.
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning
)

WEIGHTS = ("model", EMA_KEY)  # the states in a step that holds only the weights
GRACE_SECONDS = 60.0  # for a pending checkpoint after a crash, which other ranks may still finish


class Checkpointer:
    """Saves and loads the run's state. All ranks must call its methods together, unless documented otherwise."""

    def __init__(
        self,
        section: Checkpoint,
        *,
        dump_folder: str,
        group: HostGroup,
        device: torch.device,
        identity: Identity,
    ) -> None:
        self.section = section
        self.folder = Path(dump_folder) / section.folder
        self.saves = section.enable and not section.load_only
        self.newest_step = 0  # the last step whose full state was loaded or saved
        self._newest_export = -1
        self._identity = identity
        self._export_dtype = getattr(torch, section.export_dtype)
        self._intervals = Intervals(section.interval_minutes)
        self._pending: list[tuple[Save, int, Future[Path]]] = []
        self._searches: list[Future[Any]] = []
        self._host_copy = HostCopy(pinned=section.async_mode == "async_with_pinned_mem")
        self._group = with_checkpoint_errors(group)
        self._lock: FileLock | None = None
        self._retention: Retention | None = None
        if not section.enable:
            return
        self._thread = CheckpointThread(device, group.adopt)
        # All ranks must stage into the same folder.
        run_id: str = self._thread.run(lambda: group.broadcast_object(uuid.uuid4().hex[:8]))
        if self._group.rank == 0:
            # Also with `load_only`: one run at a time writes metrics and logs next to the folder.
            self._lock = run_lock(self.folder)
        if self._group.rank == 0 and self.saves:
            self._retention = Retention(
                self.folder, keep_latest_k=section.keep_latest_k, keep_every=section.keep_every
            )
        self._writer = StepWriter(
            section, self._group, identity, run_id, self._lock, self._retention
        )

    # ---- start

    def find_start(self, last_step: int, config: str = "") -> list[Start]:
        """Decide where a run to `last_step` starts. Returns the candidates in order of preference.

        Only rank 0 reads the folder. If the run is unfinished, it holds the folder's lock until
        `close`. Raises CheckpointError, also if another run holds the lock.
        config: the configuration as TOML.
        """
        decide = partial(
            decide_start, self.section, self.folder, last_step, self._identity.hf_assets, config
        )
        if not self.section.enable:
            return decide()
        candidates: list[Start] = []  # on rank 0

        def decide_step() -> int:
            candidates[:] = decide()
            return candidates[0].step

        def decide_locked() -> list[Start]:
            # Decide again under the lock: another run may have published a step in the meantime.
            starts = decide() if is_unfinished else candidates
            # A manifest of thousands of ranks takes 40 MB. `load` reads the manifests of older
            # steps again.
            return [starts[0], *(replace(older, manifest=None) for older in starts[1:])]

        is_unfinished = self._on_leader(decide_step) < last_step
        if is_unfinished:
            while not self._on_leader(self._try_lock):
                pass
        return self._on_leader(decide_locked)

    def _on_leader(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0's checkpoint thread. All ranks return its result or its error."""
        return self._thread.run(lambda: self._group.run_on_leader(action))

    def _try_lock(self) -> bool:
        """Take the lock on rank 0, or wait for less time than the collectives' time-out."""
        assert self._lock is not None
        return self._lock.try_acquire()

    def finish_last_step(self, start: Start) -> None:
        """Complete the last step of a finished run that was killed: export it and remove stages.

        Does nothing while another run holds the folder's lock.
        """
        if not self.saves:
            return

        def is_tidy() -> bool:
            assert self._lock is not None
            stages = stale_stages(self.folder)
            return not (stages or self._lock.path.exists() or self._is_export_missing(start))

        def lock() -> bool | None:
            try:
                return self._try_lock()
            except LockedError as error:
                logger.info(str(error))
                return None

        if self._on_leader(is_tidy):
            return
        while (is_locked := self._on_leader(lock)) is False:
            pass
        if is_locked:
            self._on_leader(self._remove_stages)
            self._make_missing_export(start)

    def load(
        self,
        starts: Sequence[Start],
        states: Mapping[str, Stateful],
        *,
        on_fallback: Callable[[Start], None],
    ) -> list[str]:
        """Load the first undamaged checkpoint of `starts` into `states`, in place.

        Calls `on_fallback` before each start except the first. Returns the keys of states that were
        loaded. On every rank, raises DamagedError if all are damaged, and CheckpointError if one
        does not fit this run.
        """
        section = self.section
        load = partial(
            load_states,
            states=states,
            group=self._group,
            identity=self._identity,
            exclude=section.exclude_from_loading,
            verify=section.verify,
            quantized=section.initial_load_in_hf_quantized,
        )
        for number, start in enumerate(starts):
            try:
                if number > 0:  # the caller has considered the first start already
                    start = self._thread.run(
                        partial(self._group.run_on_leader, start.with_manifest)
                    )
                    on_fallback(start)
                loaded = self._thread.run(partial(load, start))
                if start.manifest is not None:
                    start.manifest.pop("files", None)  # large, and no longer needed
                return loaded
            except DamagedError as damage:
                logger.error(f"Skipping step-{start.step}, which is damaged: {damage}")
                last_error = damage
        raise last_error

    def claim(self, start: Start, on_published: OnPublished) -> None:
        """Prepare the folder for this run after the start is loaded.

        Removes stages, renames steps after the start, and writes an export of the start that a
        killed run has not written. on_published: called after each checkpoint, on the checkpoint
        thread of rank 0.
        """

        def tidy() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            logger.info(
                f"Checkpointing active: checkpoints are read from and written to {self.folder}"
            )
            self._remove_stages()
            for path in supersede_later(self.folder, start.step, uuid.uuid4().hex[:8]):
                logger.warning(
                    f"Restarting at step {start.step}: renamed a later checkpoint to {path.name}"
                )
            if start.path is not None and start.step == self.section.load_step:
                (
                    start.path / PIN
                ).touch()  # if the same command starts again, it loads this step again

        self.newest_step = start.step
        if self.saves:
            self._writer.on_published = on_published
            self._on_leader(tidy)
            self._make_missing_export(start)

    def _remove_stages(self) -> None:
        for path in remove_stale_stages(self.folder):
            logger.info(f"Removed the unfinished checkpoint {path.name}")

    def _is_export_missing(self, start: Start) -> bool:
        """Return True if the step of `start` is due for export and has none. Call it on rank 0."""
        interval = self.section.hf_interval
        is_due = start.kind == "resume" and interval > 0 and start.step % interval == 0
        is_own = start.path is not None and start.path.parent == self.folder
        kind = (start.manifest or {}).get("kind")
        return is_due and is_own and kind != "hf" and not self._export_path(start.step).exists()

    def _make_missing_export(self, start: Start) -> None:
        """Export the stored weights of `start` if due. Raises CheckpointError like `save`."""

        def find() -> Start | None:
            if not self._is_export_missing(start):
                return None
            return start.with_manifest()

        stored = self._on_leader(find)
        if stored is None:
            return
        logger.info(f"Exporting {stored.path}: {self._export_path(stored.step)} is missing")
        try:
            self._thread.run(lambda: self._export_stored(stored))
        except CheckpointError as error:
            if self.section.on_save_error == "stop":
                raise
            logger.error(f"Could not save step-{stored.step} (hf): {error}")
        else:
            self._newest_export = stored.step

    def _export_stored(self, stored: Start) -> None:
        """Export the weights of `stored`. Runs on the checkpoint thread."""
        manifest = stored.manifest
        assert manifest is not None
        start = replace(stored, kind="warm")
        weights = load_stored_weights(start, self._group, self._identity)
        tensors = {f"model.{name}": tensor for name, tensor in weights.state_dict().items()}
        summary = {k: v for k, v in manifest.items() if k not in MANIFEST_OWN_KEYS}
        record = RunRecord(stored.step, manifest["config"], summary)
        self._writer.commit(self._export(True), record, tensors)

    # ---- save

    def due(self, step: int, last_step: int, save_asked: bool, export_asked: bool) -> list[Save]:
        """Return the checkpoints to save after this step: planned, or requested by any rank."""
        section, saves = self.section, []
        if not self.saves:
            if save_asked or export_asked:
                logger.warning(
                    "Ignoring the SAVE/EXPORT request: this run saves no checkpoints. Set "
                    "checkpoint.enable = true and checkpoint.load_only = false"
                )
            return []
        is_last = step == last_step
        is_planned = step % section.interval == 0 or (
            step == 1 and section.enable_first_step_checkpoint
        )
        if is_planned or is_last or save_asked:
            saves.append(self._last_save() if is_last else Save("full", self.folder))
        if (section.hf_interval and step % section.hf_interval == 0) or export_asked:
            saves += [] if any(save.kind == "hf" for save in saves) else [self._export(is_last)]
        return saves

    def due_at_end(self, step: int, *, is_finished: bool, export_asked: bool) -> list[Save]:
        """Return the checkpoints to save when the run ends at `step`. Call `wait` first."""
        if not self.saves:
            return []
        full = (
            []
            if is_finished or self.newest_step == step
            else [Save("full", self.folder, is_last=True)]
        )
        return full + ([self._export(True)] if export_asked and self._newest_export != step else [])

    def _export_path(self, step: int) -> Path:
        return self.folder / HF_EXPORTS / step_name(step)

    def _export(self, is_last: bool) -> Save:
        return Save("hf", self.folder / HF_EXPORTS, self._export_dtype, is_last=is_last)

    def _last_save(self) -> Save:
        if not self.section.last_save_model_only:
            return Save("full", self.folder, is_last=True)
        return Save(
            "hf" if self.section.last_save_in_hf else "weights",
            self.folder,
            self._export_dtype,
            is_last=True,
        )

    def is_overdue(self) -> bool:
        """Return True if `checkpoint.interval_minutes` have passed. One rank decides for all."""
        return self.saves and self._intervals.are_over()

    def save(
        self, saves: Sequence[Save], record: RunRecord, states: Mapping[str, Stateful]
    ) -> None:
        """Write and publish a step in each form of `saves`, after all earlier checkpoints.

        In the foreground, all are visible on return, or every rank raises CheckpointError. In the
        background, the next call of `save` or `wait` raises it. With `on_save_error = "continue"`,
        an error is only logged.
        """
        self.wait()
        start_time = time.monotonic()
        is_full = any(save.kind == "full" for save in saves)
        saved_states = states if is_full else {k: states[k] for k in WEIGHTS if k in states}
        tensors = {
            f"{key}.{name}": v
            for key, state in saved_states.items()
            for name, v in state.state_dict().items()
        }
        in_background = self.section.async_mode != "disabled" and not saves[-1].is_last
        forms = " and ".join(save.kind for save in saves)
        logger.info(
            f"Saving step {record.step} ({forms}){' in the background' if in_background else ''}"
        )
        if in_background:
            tensors = self._host_copy.copy(tensors)
        for save in saves:
            commit = partial(self._commit, save, record, tensors)
            self._pending.append((save, record.step, self._thread.submit(commit)))
        self._intervals.record_checkpoint()
        if not in_background:
            self.wait()
            return
        seconds = time.monotonic() - start_time
        self._intervals.record_blocked(seconds)
        logger.info(f"Staged step {record.step} in {seconds:.2f} seconds; {self._intervals.cost()}")

    def _commit(self, save: Save, record: RunRecord, tensors: Mapping[str, Any]) -> Path:
        """Write and publish a step. Runs on the checkpoint thread."""
        self._host_copy.wait()
        if save.kind != "full":
            keys = WEIGHTS if save.kind == "weights" else ("model",)
            tensors = {k: value for k, value in tensors.items() if k.split(".")[0] in keys}
        return self._writer.commit(save, record, tensors)

    def pin_before(self, step: int) -> Callable[[], None]:
        """Pin the newest full step before `step`. Returns a function that removes the pin.

        Never blocks. Call it on rank 0.
        """
        if not self.saves:
            return lambda: None

        pinned = self._thread.submit(partial(pin_before, self.folder, step))

        def unpin() -> None:
            def remove() -> None:
                pin = pinned.result()
                # A user who wants to keep the step writes a reason into the file.
                if pin is not None and pin.exists() and not pin.read_bytes():
                    pin.unlink()

            self._thread.submit(remove)

        return unpin

    def order_updates(self) -> None:
        """Make the device wait for a pending copy before the weights change. Never blocks."""
        self._host_copy.order_updates()

    def has_failed(self) -> bool:
        """Return True if a background checkpoint has failed and must end the run.

        Never blocks. Any rank may call it independently and then request a stop.
        """
        if self.section.on_save_error == "continue":
            return False
        return any(
            future.done() and future.exception() is not None for _, _, future in self._pending
        )

    def wait(self) -> None:
        """Block until all pending checkpoints are complete.

        Raises CheckpointError if one has failed, unless `on_save_error` is "continue".
        """
        start_time = time.monotonic()
        errors = []
        pending, self._pending = self._pending, []
        for save, step, future in pending:
            try:
                future.result()
            except CheckpointError as error:
                errors.append(f"Could not save step-{step} ({save.kind}): {error}")
                continue
            if save.kind == "full" and not save.suffix:
                self.newest_step = step
            elif save.kind == "hf":
                self._newest_export = step
        if pending:
            seconds = time.monotonic() - start_time
            self._intervals.record_blocked(seconds)
            logger.info(
                f"Training waited {seconds:.2f} seconds for the checkpoint of step "
                f"{pending[-1][1]}; {self._intervals.cost()}"
            )
        if not errors:
            return
        if pending[-1][0].is_last or self.section.on_save_error == "stop":
            raise CheckpointError("; ".join(errors))
        logger.error(
            f"SAVE FAILED: {'; '.join(errors)}. Training continues until the next checkpoint "
            "(checkpoint.on_save_error = 'continue')"
        )

    def save_nonfinite(self, record: RunRecord, states: Mapping[str, Stateful]) -> str | None:
        """Save a state with an inf or NaN as `step-N.nonfinite`, in the foreground.

        Returns its path, also if it exists already, or None if this run saves no checkpoints.
        """
        if not self.saves:
            return None
        path = self.folder / f"{step_name(record.step)}{NONFINITE}"
        self.wait()
        if not self._on_leader(path.exists):
            save = Save("full", self.folder, is_last=True, suffix=NONFINITE)
            self.save([save], record, states)
        return str(path)

    def find_previous(self, step: int, callback: Callable[[Path | None], None]) -> None:
        """Call `callback` with the checkpoint from which `step` can be replayed, or None.

        This is the non-finite state of the step before, or the newest full step before `step`.
        Never blocks. Call it on rank 0. The callback runs on the checkpoint thread after pending
        checkpoints, so that no checkpoint is deleted in the meantime.
        """

        def search() -> None:
            try:
                callback(self._previous_checkpoint(step) if self.saves else None)
            except Exception as error:  # must not end the run
                logger.error(f"Could not record how to replay step {step}: {error!r}")

        if self.saves:
            self._searches = [self._thread.submit(search)]
        else:
            search()

    def _previous_checkpoint(self, step: int) -> Path | None:
        path = self.folder / f"{step_name(step - 1)}{NONFINITE}"
        if path.is_dir():
            return path
        newest = newest_before(self.folder, step)
        return None if newest is None else newest.path

    # ---- end

    def close(self) -> None:
        """Wait for pending checkpoints, delete expired steps, and release the folder's lock.

        Any rank may call it independently.
        """
        if not self.section.enable:
            return
        if self._pending:
            logger.warning(f"Waiting up to {GRACE_SECONDS:.0f} s for a pending checkpoint")
        wait(self._searches + [future for _, _, future in self._pending], timeout=GRACE_SECONDS)
        if self._retention is not None:
            self._retention.close()
        if self._lock is not None:
            self._lock.release()
        self._thread.close()


class Intervals:
    """Times `checkpoint.interval_minutes` and the fraction of the run during which saving blocks.

    Clocks differ between ranks, so one rank decides for all.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 60 * minutes
        self._clock = clock
        self._start = self._last_save = clock()
        self._blocked_seconds = 0.0
        self._num_checkpoints = 0

    def are_over(self) -> bool:
        """Return True if the interval has passed since the last checkpoint or the start.

        Restarts the interval, because the checkpoint follows some steps later. Always False if the
        interval is 0.
        """
        now = self._clock()
        is_over = 0 < self._seconds <= now - self._last_save
        if is_over:
            self._last_save = now
        return is_over

    def record_checkpoint(self) -> None:
        """Count a checkpoint and restart the interval."""
        self._last_save = self._clock()
        self._num_checkpoints += 1

    def record_blocked(self, seconds: float) -> None:
        """Add time for which saving blocked training."""
        self._blocked_seconds += seconds

    def cost(self) -> str:
        """Return a line such as `3 checkpoints took 4.2 seconds, 1.05% of the run`."""
        run_seconds = max(self._clock() - self._start, self._blocked_seconds, 1e-9)
        fraction = self._blocked_seconds / run_seconds
        noun = "checkpoint" if self._num_checkpoints == 1 else "checkpoints"
        return (
            f"{self._num_checkpoints} {noun} took {self._blocked_seconds:.1f} seconds, "
            f"{fraction:.2%} of the run"
        )
