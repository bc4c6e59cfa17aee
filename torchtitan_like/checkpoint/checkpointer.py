"""When to save, what a save is, and which checkpoint a run starts from. A checkpoint that is visible is complete.

All work on disk is done by the checkpoint thread (`SavingThread`), in the same order on every rank: in the foreground
the trainer waits for it, in the background (`checkpoint.async_mode`) it goes on from a copy of the state.
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

from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.intervals import Intervals
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.lock import LockedError, RunLock
from torchtitan_like.checkpoint.retention import PIN, Retention, newest_before, pin_before
from torchtitan_like.checkpoint.saving import Save, StepWriter
from torchtitan_like.checkpoint.saving_thread import SavingThread
from torchtitan_like.checkpoint.staging import Staging
from torchtitan_like.checkpoint.start import Start, decide_start
from torchtitan_like.checkpoint.stateful import Stateful
from torchtitan_like.checkpoint.step_folders import (
    HF_EXPORTS,
    MANIFEST_OWN_KEYS,
    NONFINITE,
    file_records,
    remove_stale_stages,
    stale_stages,
    supersede_later,
)
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.distributed.world import HostGroup

if TYPE_CHECKING:
    from torchtitan_like.config.sections_scale import Checkpoint

T = TypeVar("T")
logger = logging.getLogger()
# One process without a group is a normal way to run, not a mistake to be warned of.
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning
)

GRACE_SECONDS = 60.0  # for a save under way when the run crashes: the other ranks may still be able to finish it


class Checkpointer:
    """Saves and loads the run's state. All ranks call its methods together, but those that say otherwise."""

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
        self.newest_step = 0  # of the last full state loaded or saved
        self._newest_export = -1
        self._identity, self._export_dtype = identity, getattr(torch, section.export_dtype)
        self._intervals = Intervals(section.interval_minutes)
        self._pending: list[tuple[Save, int, Future[Path]]] = []
        self._looking: list[Future[Any]] = []
        self._staging = Staging(pinned=section.async_mode == "async_with_pinned_mem")
        self._votes = Votes(group)
        self._lock: RunLock | None = None
        self._retention: Retention | None = None
        if not section.enable:
            return
        self._thread = SavingThread(device, group.adopt)
        # One name for all ranks: they must stage into one folder.
        run_id: str = self._thread.run(lambda: group.broadcast_object(uuid.uuid4().hex[:8]))
        if (
            self._votes.is_leader
        ):  # also to load alone: one run writes metrics, logs and config beside the checkpoints
            self._lock = RunLock(self.folder)
        if self._votes.is_leader and self.saves:
            self._retention = Retention(
                self.folder, keep_latest_k=section.keep_latest_k, keep_every=section.keep_every
            )
        self._writer = StepWriter(
            section, self._votes, identity, run_id, self._lock, self._retention
        )

    # ---- start

    def find_start(self, last_step: int, config: str = "") -> list[Start]:
        """Decide where a run to `last_step` starts; what to try in order. Only rank 0 reads the folder. `config`: in TOML.

        When there is something to do, every other run is kept out of the folder from here to `close`. Raises
        CheckpointError, also when another run is at work there.
        """
        decide = partial(
            decide_start, self.section, self.folder, last_step, self._identity.hf_assets, config
        )
        if not self.section.enable:
            return decide()
        decided: list[Start] = []  # on rank 0

        def decide_step() -> int:
            decided[:] = decide()
            return decided[0].step

        def decide_locked() -> list[Start]:
            starts = (
                decide() if is_unfinished else decided
            )  # again, now that nobody else can publish
            # The manifest of a step is 40 MB where thousands of ranks have written it: of the others see `load`.
            return [starts[0], *(replace(older, manifest=None) for older in starts[1:])]

        is_unfinished = self._on_leader(decide_step) < last_step
        if is_unfinished:
            while not self._on_leader(self._try_lock):
                pass
        return self._on_leader(decide_locked)

    def _on_leader(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0's checkpoint thread; all ranks return its result or raise its error."""
        return self._thread.run(lambda: self._votes.leader_does(action))

    def _try_lock(self) -> bool:
        """On rank 0: take the folder's lock, or wait for a moment. No call lasts as long as a time-out of the others."""
        assert self._lock is not None
        return self._lock.try_acquire()

    def finish_last_step(self, start: Start) -> None:
        """Make the export of a run's last step, and remove what is unfinished, where a kill has prevented that.

        For a run with nothing left to train. Leaves the folder alone while another run is at work in it.
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
        consider: Callable[[Start], None],
    ) -> None:
        """Read the first of `starts` that is whole into `states`, in place; `consider` is called before each.

        Raises DamagedError when none is whole, CheckpointError when one does not fit this run; on every rank.
        """
        section = self.section
        load = partial(
            load_states, states=states, votes=self._votes, identity=self._identity, exclude=section.exclude_from_loading,
            verify=section.verify, quantized=section.initial_load_in_hf_quantized,
        )  # fmt: skip
        for number, start in enumerate(starts):
            try:
                if number > 0:  # the first has been considered before anything was built
                    start = self._thread.run(partial(self._votes.leader_does, start.with_manifest))
                    consider(start)
                self._thread.run(partial(load, start))
                if start.manifest is not None:
                    start.manifest.pop("files", None)  # large, and not needed any more
                return
            except DamagedError as damage:
                logger.error(f"step-{start.step} is damaged and is not used: {damage}")
                last = damage
        raise last

    def claim(
        self, start: Start, on_published: Callable[[Save, Path, float], None] = lambda *_: None
    ) -> None:
        """Make the folder this run's, once the start is loaded.

        Unfinished stages go, steps beyond the start are renamed, and an export of it that a kill has prevented is made.
        `on_published`: see `save`.
        """

        def tidy() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            logger.info(
                f"Checkpointing active: checkpoints are read from and written to {self.folder}"
            )
            self._remove_stages()
            for path in supersede_later(self.folder, start.step, uuid.uuid4().hex[:8]):
                logger.warning(
                    f"The run restarts at step {start.step}: a later checkpoint is now {path.name}"
                )
            if start.path is not None and start.step == self.section.load_step:
                (start.path / PIN).touch()  # the same command, started again, asks for it once more

        self.newest_step = start.step
        if self.saves:
            self._on_leader(tidy)
            self._make_missing_export(start, on_published)

    def _remove_stages(self) -> None:
        for path in remove_stale_stages(self.folder):
            logger.info(f"Removed the unfinished {path.name}")

    def _is_export_missing(self, start: Start) -> bool:
        """On rank 0: was the step of `start` to be exported too, and is that export not there?"""
        interval = self.section.hf_interval
        is_due = start.kind == "resume" and interval > 0 and start.step % interval == 0
        is_own = start.path is not None and start.path.parent == self.folder
        kind = (start.manifest or {}).get("kind")
        return is_due and is_own and kind != "hf" and not self._export_path(start.step).exists()

    def _make_missing_export(
        self, start: Start, on_published: Callable[[Save, Path, float], None] = lambda *_: None
    ) -> None:
        """Export the stored weights of `start`. Raises CheckpointError as `save` does."""

        def find() -> Start | None:
            if not self._is_export_missing(start):
                return None
            stored = start.with_manifest()
            assert stored.manifest is not None
            return stored if stored.manifest["format_version"] > 1 else None

        stored = self._on_leader(find)
        if stored is None:
            return
        logger.info(f"Exporting {stored.path}: {self._export_path(stored.step)} is missing")
        try:
            self._thread.run(lambda: self._export_stored(stored, on_published))
        except CheckpointError as error:
            if self.section.on_save_error == "stop":
                raise
            logger.error(f"step-{stored.step} (hf) could not be saved: {error}")
        else:
            self._newest_export = stored.step

    def _export_stored(
        self, stored: Start, on_published: Callable[[Save, Path, float], None]
    ) -> None:
        """On the checkpoint thread."""
        from torchtitan_like.checkpoint.dcp_storage import ExtentReader
        from torchtitan_like.checkpoint.stored_weights import StoredWeights

        path, manifest, group = stored.path, stored.manifest, self._votes.group
        assert path is not None and manifest is not None
        reader = ExtentReader(path, file_records(manifest))
        metadata: dict[str, Any] = {}
        self._votes.all_do(lambda: metadata.update(reader.read_metadata().state_dict_metadata))
        weights = StoredWeights(metadata, group.rank, group.size)
        start = replace(stored, kind="warm")
        load_states(start, {"model": weights}, self._votes, self._identity)
        tensors = {f"model.{name}": tensor for name, tensor in weights.state_dict().items()}
        self._writer.commit(
            self._export(True),
            stored.step,
            tensors,
            config_toml=manifest["config"],
            summary={k: v for k, v in manifest.items() if k not in MANIFEST_OWN_KEYS},
            on_published=on_published,
        )

    # ---- save

    def due(self, step: int, last_step: int, save_asked: bool, export_asked: bool) -> list[Save]:
        """The saves planned after this step, or asked for by all ranks' agreement."""
        section, saves = self.section, []
        if not self.saves:
            if save_asked or export_asked:
                logger.warning(
                    "SAVE and EXPORT ask in vain: nothing is saved, see checkpoint.enable and load_only"
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
        """What is still to be saved of a run that ends at `step`; nothing is under way (`wait`)."""
        if not self.saves:
            return []
        full = (
            []
            if is_finished or self.newest_step == step
            else [Save("full", self.folder, is_last=True)]
        )
        return full + ([self._export(True)] if export_asked and self._newest_export != step else [])

    def _export_path(self, step: int) -> Path:
        return self.folder / HF_EXPORTS / f"step-{step}"

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
        """Have `checkpoint.interval_minutes` passed since the last save? For one rank, which then asks all."""
        return self.saves and self._intervals.are_over()

    def save(
        self,
        saves: Sequence[Save],
        step: int,
        states: Mapping[str, Stateful],
        *,
        config_toml: str,
        summary: Mapping[str, Any],
        on_published: Callable[[Save, Path, float], None],
    ) -> None:
        """Write and publish a step in each form of `saves`; those of the step before are awaited first.

        In the foreground they are visible on return, or CheckpointError is raised on every rank. In the background a
        failure is raised by the next call of `save` or `wait`; with `on_save_error = "continue"` it is only logged, and
        the next save tries again. `on_published` is called on rank 0, on the checkpoint thread.
        """
        self.wait()
        begin = time.monotonic()
        full = any(save.kind == "full" for save in saves)
        chosen = states if full else {"model": states["model"]}
        tensors = {
            f"{key}.{name}": v
            for key, state in chosen.items()
            for name, v in state.state_dict().items()
        }
        in_background = self.section.async_mode != "disabled" and not saves[-1].is_last
        forms = " and ".join(save.kind for save in saves)
        logger.info(f"Saving step {step} ({forms}){' in the background' if in_background else ''}")
        if in_background:
            tensors = self._staging.copy(tensors)
        told: dict[str, Any] = {
            "config_toml": config_toml,
            "summary": summary,
            "on_published": on_published,
        }
        for save in saves:
            commit = partial(self._commit, save, step, tensors, **told)
            self._pending.append((save, step, self._thread.submit(commit)))
        self._intervals.record_checkpoint()
        if not in_background:
            self.wait()
            return
        self._intervals.record_blocked(time.monotonic() - begin)
        logger.info(
            f"Staged step {step} in {time.monotonic() - begin:.2f} seconds; {self._intervals.cost()}"
        )

    def _commit(self, save: Save, step: int, tensors: Mapping[str, Any], **rest: Any) -> Path:
        """On the checkpoint thread."""
        self._staging.wait()
        if save.kind != "full":
            tensors = {name: value for name, value in tensors.items() if name.startswith("model.")}
        return self._writer.commit(save, step, tensors, **rest)

    def pin_before(self, step: int) -> Callable[[], None]:
        """Keep the newest full step before `step`, whatever comes; returns what takes that back. On rank 0; never blocks."""
        if not self.saves:
            return lambda: None

        pinned = self._thread.submit(partial(pin_before, self.folder, step))

        def unpin() -> None:
            def remove() -> None:
                pin = pinned.result()
                if (
                    pin is not None and pin.exists() and not pin.read_bytes()
                ):  # nobody else wants to keep it
                    pin.unlink()

            self._thread.submit(remove)

        return unpin

    def order_updates(self) -> None:
        """Call before the weights change: the device then updates them after a copy under way. Never blocks."""
        self._staging.order_updates()

    def has_failed(self) -> bool:
        """Has a save in the background failed in a way that ends the run? Never blocks. For one rank, to tell all."""
        if self.section.on_save_error == "continue":
            return False
        return any(
            future.done() and future.exception() is not None for _, _, future in self._pending
        )

    def wait(self) -> None:
        """Block until every save under way is over. Raises its CheckpointError unless the run is to go on without it."""
        begin, errors = time.monotonic(), []
        pending, self._pending = self._pending, []
        for save, step, future in pending:
            try:
                future.result()
            except CheckpointError as error:
                errors.append(f"step-{step} ({save.kind}) could not be saved: {error}")
                continue
            if save.kind == "full" and not save.suffix:
                self.newest_step = step
            elif save.kind == "hf":
                self._newest_export = step
        if pending:
            seconds = time.monotonic() - begin
            self._intervals.record_blocked(seconds)
            logger.info(
                f"Training stood for {seconds:.2f} seconds for the save of step {pending[-1][1]}; {self._intervals.cost()}"
            )
        if not errors:
            return
        if pending[-1][0].is_last or self.section.on_save_error == "stop":
            raise CheckpointError("; ".join(errors))
        logger.error(
            "SAVE FAILED, and training goes on (checkpoint.on_save_error = 'continue'); the next save tries again: "
            + "; ".join(errors)
        )

    def save_nonfinite(
        self, step: int, states: Mapping[str, Stateful], **content: Any
    ) -> str | None:
        """Write a state that holds an inf or nan as `step-N.nonfinite`, in the foreground; its path.

        Nothing is written if it exists, and None is returned if this run saves no checkpoints.
        `content` is what `save` takes.
        """
        if not self.saves:
            return None
        path = self.folder / f"step-{step}{NONFINITE}"
        self.wait()
        if not self._on_leader(path.exists):
            save = Save("full", self.folder, is_last=True, suffix=NONFINITE)
            self.save([save], step, states, **content)
        return str(path)

    def look_back(self, step: int, then: Callable[[Path | None], None]) -> None:
        """Call `then` with the state to replay `step` from, None if there is none.

        That is the state just before `step` if it was saved as non-finite, or else the newest full
        step before `step` that this run has saved or loaded.

        On the checkpoint thread, behind the saves under way, so that nothing is deleted meanwhile. On rank 0; never blocks.
        """

        def look() -> None:
            try:
                then(self._state_before(step) if self.saves else None)
            except Exception as error:  # no reason to end a run
                logger.error(f"What step {step} is to leave behind is not kept: {error!r}")

        if self.saves:
            self._looking = [self._thread.submit(look)]
        else:
            look()

    def _state_before(self, step: int) -> Path | None:
        path = self.folder / f"step-{step - 1}{NONFINITE}"
        if path.is_dir():
            return path
        newest = newest_before(self.folder, step)
        return None if newest is None else newest.path

    # ---- end

    def close(self) -> None:
        """Let a save under way end, delete what is due, free the folder. For each rank alone."""
        if not self.section.enable:
            return
        if self._pending:
            logger.warning("The run ends while a save is under way: waiting for it")
        wait(self._looking + [future for _, _, future in self._pending], timeout=GRACE_SECONDS)
        if self._retention is not None:
            self._retention.close()
        if self._lock is not None:
            self._lock.release()
        self._thread.close()
