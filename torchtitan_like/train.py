"""One training run: build, train, close.

Run `torchrun -m torchtitan_like.train --job.config_file X.toml [--section.key value ...]`, or
`python -m torchtitan_like.train ...` for one process.

`Trainer.train_step` is one step (step.py). `Trainer.train` is the order of steps, checkpoints and stops.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Handle signals before all imports, which take seconds. `run` imports this module by name.
    from torchtitan_like.process_start import begin_rank

    command_line = begin_rank(sys.argv[1:])

    from torchtitan_like.resilience.end import end_process
    from torchtitan_like.run import main

    end_process(main(command_line))

import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_like.build import (
    build_data,
    build_metrics,
    build_model,
    build_optimization,
    describe_attention,
)
from torchtitan_like.checkpoint.changes import (
    check_changes,
    check_extensions,
    diff_settings,
    warm_differences,
)
from torchtitan_like.checkpoint.fingerprint import numeric_fingerprint, resume_line
from torchtitan_like.checkpoint.saving import Save
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.stateful import (
    JsonState,
    ModelState,
    Progress,
    Stateful,
)
from torchtitan_like.checkpoint.stored_weights import EMA_KEY
from torchtitan_like.checkpoint.torchtitan import check_data_choice
from torchtitan_like.config import dump_toml
from torchtitan_like.data.batches.batch import (
    Batch,
    chain_digest,
    count_valid,
    count_valid_by_source,
)
from torchtitan_like.data.errors import CacheWriteError, DataMismatch, ReadInterrupted
from torchtitan_like.distributed.activation_offload import ActivationOffload
from torchtitan_like.distributed.data_parallel import GradientSync, free_gathered
from torchtitan_like.distributed.determinism import seed_everything
from torchtitan_like.distributed.initialize import initialize, weight_hash
from torchtitan_like.distributed.recorder import trace_file
from torchtitan_like.distributed.replica_groups import (
    GroupLostError,
    GroupMismatch,
    GroupPosition,
    GroupStep,
    Losses,
    common_position,
)
from torchtitan_like.distributed.world import PendingSum
from torchtitan_like.extensions.used import used_extensions
from torchtitan_like.feed import Feed
from torchtitan_like.guard import Guard
from torchtitan_like.models.spec import describe_size
from torchtitan_like.monitor.attempt import open_attempt
from torchtitan_like.monitor.experts import ExpertMetrics
from torchtitan_like.monitor.garbage import GarbageCollection
from torchtitan_like.monitor.log import add_file, logger
from torchtitan_like.monitor.plan_check import PlanCheck, find_plan
from torchtitan_like.monitor.profiler import maybe_profile
from torchtitan_like.monitor.rows import Row, StepRecord
from torchtitan_like.optim.schedule import SavedSchedule
from torchtitan_like.replay_bundle import ReplayBundleWriter
from torchtitan_like.resilience.agreement import PendingAgreement, StepAgreement, send
from torchtitan_like.resilience.gradient_check import WrongGradientsError
from torchtitan_like.resilience.heartbeat import Heartbeat
from torchtitan_like.resilience.limits import Limits, process_start_time
from torchtitan_like.resilience.nonfinite import (
    HeldStep,
    NonFiniteStateError,
    nonfinite_names,
)
from torchtitan_like.resilience.requests import (
    EXIT_CODES,
    Request,
    Switches,
    decode_requests,
    first_stop,
)
from torchtitan_like.resilience.spikes import SpikeDetector
from torchtitan_like.resolved import RankRun, facts_of
from torchtitan_like.step import StepRunner
from torchtitan_like.util.credentials import mask_values
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.files import WriteFailures, storage_error
from torchtitan_like.util.host_memory import host_memory
from torchtitan_like.util.output import on_screen
from torchtitan_like.util.plan_file import MODULES_EVENT, settings_of
from torchtitan_like.util.run_directory import DATA_WAIT, log_file
from torchtitan_like.util.units import GIB
from torchtitan_like.validation import DatasetLoss, ValidationInterrupted, losses_of_datasets


@dataclass
class StepInput:
    """The batch of a step, its agreement in progress, and the seconds it took to read the batch.

    batch: None after the last step. position: of the stream, before the batch.
    """

    batch: Batch | None
    agreement: PendingAgreement
    seconds: float
    position: int


class Trainer:
    """Builds a run from its configuration. `train` then runs its steps."""

    def __init__(self, run: RankRun, starts: list[Start]) -> None:
        """Build all parts, and load the first undamaged start of `starts`.

        A collective. Raises the errors of `run.CODES` on every rank.
        """
        self.start_clock, world = run.clock, run.world
        weights = "initialize the weights" if starts[0].kind == "scratch" else "load the weights"
        config = run.config
        first_step = "compile and run step" if config.compile.enable else "run step"
        first_step += f" {starts[0].step + 1}"
        self.start_clock.plan("read the data", "build the model", weights, first_step)
        self.start_clock.begin("read the data")
        self.run = run
        self.config = config
        self.world = world
        self.checkpointer = run.checkpointer
        self.requests = run.requests
        self.position = run.position
        self.is_leader = world.rank == 0

        # Run directory and log file.
        self.failures = WriteFailures(continues=config.checkpoint.on_save_error == "continue")
        masked_config = mask_values(config.model_dump())
        self.attempt = open_attempt(
            config.job, world, self.failures, config=masked_config, toml_text=dump_toml(config)
        )
        self.position.attempt_folder = self.attempt.folder
        self.heartbeat = Heartbeat(
            self.attempt.folder,
            self.position,
            world.rank,
            num_ranks=world.size,
            trace=trace_file(config.comm, self.attempt.run, world.rank),
            failures=self.failures,
        )

        # The start: a checkpoint, weights, or new weights.
        self.start = starts[0]
        self.progress = Progress(step=self.start.step)
        self.differences = self._check_settings(self.start)

        # All randomness depends on one seed.
        self.seed = self._agree_on_seed()
        seed_everything(self.seed)
        self.garbage = GarbageCollection(config.training.gc_freq, config.training.gc_debug)

        # Data. Check it against the checkpoint before building the model, which takes minutes.
        data = build_data(run, self.seed)
        self.batches = data.batches
        self.read_batch: Callable[[], Batch | None] = partial(next, self.batches, None)
        self._compare_warm_start()
        self.validation_sets = data.validation_sets
        self.bytes_of_token = data.bytes_of_token
        stored_data = self._stored("data")
        if stored_data and "dataloader" not in config.checkpoint.exclude_from_loading:
            self.batches.check_state(stored_data)

        self.start_clock.begin("build the model")
        # Model: build it on meta, shard, materialize, then initialize it from the seed.
        name = f"{config.model.name} {config.model.flavor}"
        logger.info(f"Building {name} with {run.args}")
        logger.info(f"Model {name} size: {describe_size(run.spec, run.args)}")
        with_tokens = bool(self.batches.sources or self.validation_sets)
        model = build_model(run, world, with_tokens=with_tokens)
        attention = describe_attention(run, world.device)
        for line in [*model.lines, *([attention] if attention else [])]:
            logger.info(line)
        self.parts = model.parts
        self.pipeline = model.pipeline
        self.feed = Feed(world, model.context)
        self.activation_offload = model.offload
        self.start_clock.begin(weights)
        is_new = self.start.kind == "scratch" or self.start.upcycles
        if is_new or "model" in config.checkpoint.exclude_from_loading:
            for part in self.parts:
                initialize(part, run.spec.init_table(run.args), self.seed)
        self.gradient_sync = GradientSync(self.parts[0], world.dims)

        # Optimizer, schedule, averages, balance of experts.
        self.optim = build_optimization(run, self.parts, world, self.seed)
        for line in self.optim.describe():
            logger.info(line)
        balancer = self.optim.balancer
        layers = [] if balancer is None else balancer.layers
        self.expert_metrics = ExpertMetrics([layer.number for layer in layers], world.dims.ep)

        self._connect_groups()

        # Metrics and the reasons to stop.
        self.metrics = build_metrics(
            run,
            world,
            self.attempt,
            self.failures,
            sources=self.batches.sources,
            run_config=masked_config,
        )
        self.switches = Switches(self.attempt.run, config.resilience)
        self.limits = Limits(config.resilience, world.device, keeps_time=self.is_leader)
        self.numeric = numeric_fingerprint(config, world.device, world.dims.layout())

        # Load. A start that fails leaves the checkpoint folder unchanged.
        self.states: dict[str, Stateful] = self._states()
        loaded: list[str] = []
        if self.start.kind != "scratch":
            loaded = self.checkpointer.load(starts, self.states, consider=self._fall_back)
            self.garbage.collect("GC collection after checkpoint loading")
        if is_new:
            self._log_initial_weights()
        # The dense checkpoint that this run, or the run it continues, has started from.
        self.upcycled_from: str | None = self._stored("upcycled_from")
        if self.start.upcycles:
            self.upcycled_from = str(self.start.path)
        if self.start.kind == "resume":
            differences = [*self.differences, *(f"data: {name}" for name in self.batches.changes)]
            line = resume_line(self._stored("numeric"), self.numeric, differences)
            logger.info(f"Resume: {line}", extra=on_screen())
        self.optim.refresh()
        if self.optim.ema is not None and EMA_KEY not in loaded:
            self.optim.ema.start()
            logger.info(f"EMA: the average starts from the weights of step {self.start.step}")
        # The position of the data is restored, even if parts of the checkpoint were excluded.
        self.progress = replace(self.progress, step=self.start.step, position=self.batches.position)
        self.checkpointer.claim(self.start, partial(self._published, self.start.step))

        # Non-finite steps and spikes.
        self.guard: Guard[StepInput] = Guard(
            run, self.parts, self.optim, self.attempt, self.progress, self._stored("numbers") or {}
        )
        self.replay_bundles = self._observe_rows() if self.is_leader else None
        self.step_runner = StepRunner(
            world,
            self.seed,
            model,
            self.optim,
            self.gradient_sync,
            self.feed,
            self.guard.gate,
            config.training.max_norm,
            num_sources=len(self.batches.sources),
            on_micro_batch=self._move_to_micro_batch,
            order_updates=self.checkpointer.order_updates,
            gradient_check=self.guard.gradient_check,
        )

        # Metrics continue after the last row of the loaded step.
        self.metrics.n_tokens_seen = self.progress.n_tokens_seen
        world.step_group.run_on_leader(self._rewind_metrics)
        self._log_geometry()
        self.start_clock.begin(first_step)

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.config.training.steps

    # ---- start

    def _stored(self, key: str) -> Any:
        """Return an entry of the manifest that the run resumes from, or None."""
        manifest = self.start.manifest or {}
        return manifest.get(key) if self.start.kind == "resume" else None

    def _check_settings(self, start: Start) -> list[str]:
        """Log a start, and return the differences between its settings and this run's.

        Raises ChangedError if settings that shape the run have changed.
        """
        logger.info(str(start), extra=on_screen())
        differences = [f"{part} not loaded" for part in self.config.checkpoint.exclude_from_loading]
        stored = start.manifest or {}
        if start.kind == "resume" and start.format == "dcp":
            check_data_choice(
                start, self.config.training.skip_steps, self.config.checkpoint.exclude_from_loading
            )
            differences.append("the checkpoint is TorchTitan's")
        if start.kind != "resume" or "config" not in stored:
            return differences
        check_extensions(stored, self.config.checkpoint.allow_change)
        resolved = {"global_batch_size": self.run.geometry.global_batch_size}
        changes = diff_settings(stored["config"], self.config.model_dump(), stored, resolved)
        if note := check_changes(changes):
            logger.info(note)
        if reordered := changes.reordered():
            logger.warning(
                "The order of the samples differs from the run that saved the checkpoint: "
                f"{'; '.join(reordered)}"
            )
        return differences + changes.accepted()

    def _compare_warm_start(self) -> None:
        """Warn of differences from the model and tokenizer that trained the initial weights."""
        stored = self.start.manifest or {}
        if self.start.kind != "warm" or "config" not in stored:
            return
        tokenizer = self.batches.fingerprint["tokenizer"]
        changes = warm_differences(stored, self.config.model_dump(), tokenizer)
        if changes:
            logger.warning(
                f"The weights in {self.start.path} were trained with other settings: "
                f"{'; '.join(map(str, changes))}. Expected the same model and tokenizer. Restore "
                "them, unless the change is intended"
            )

    def _fall_back(self, start: Start) -> None:
        """Start from an older checkpoint, because all newer ones are damaged."""
        self.differences = self._check_settings(start)
        self.start = start
        self.progress = Progress(step=start.step)

    def _agree_on_seed(self) -> int:
        """Return debug.seed, the seed of the resumed run, or a new one. Broadcasts from rank 0."""
        chosen = self.config.debug.seed
        seed = chosen if chosen is not None else self.start.seed
        if seed is None:
            seed = self._new_seed()
        seed = int(self.world.step_group.broadcast_object(seed))
        logger.info(f"Seed: {seed}" + ("" if chosen is not None else " (debug.seed is unset)"))
        return seed

    def _new_seed(self) -> int:
        return secrets.randbits(31)

    def _states(self) -> dict[str, Stateful]:
        """Return the states of a checkpoint, by the names of `checkpoint.exclude_from_loading`."""

        def restore_progress(state: dict[str, Any]) -> None:
            self.progress = Progress(**state)

        peak_lr = self.config.optimizer.lr
        states: dict[str, Stateful] = {
            "model": ModelState(self.parts),
            "optimizer": self.optim,
            "lr_scheduler": SavedSchedule(
                self.optim.schedule, lambda: self.start.step + 1, peak_lr
            ),
            "dataloader": JsonState(self._data_state, self._restore_data),
            "train_state": JsonState(lambda: asdict(self.progress), restore_progress),
        }
        if self.optim.ema is not None:
            states[EMA_KEY] = self.optim.ema
        return states

    def _data_state(self) -> dict[str, Any]:
        """Return the state of the data after the last trained step."""
        return self.batches.state_dict(self.progress.position)

    def _restore_data(self, state: dict[str, Any]) -> None:
        """Restore `_data_state`. Raises DataMismatch."""
        self.batches.load_state_dict(state)
        try:
            self._restore_groups(state)
        except GroupMismatch as error:
            raise DataMismatch(str(error)) from error

    # ---- replica groups

    # GroupTrainer overrides these methods. Without `[fault_tolerance]` there is only one group.

    def _connect_groups(self) -> None:
        """Connect this group to the others, after its optimizer is built."""

    def _restore_groups(self, state: dict[str, Any]) -> None:
        """Restore the positions of all groups from a data state. Raises GroupMismatch."""
        common_position(state, 1)

    def _join_groups(
        self, inputs: StepInput, agreement: StepAgreement
    ) -> tuple[StepInput, StepAgreement]:
        """Wait for the other groups before a step. Return this group's inputs and agreement."""
        return inputs, agreement

    def _exchange(self, local: GroupStep) -> GroupStep:
        """Return the sums over the groups that take part in the step."""
        return local

    def _reduce(self, losses: Losses) -> Losses:
        """Sum the gradients over the groups, and return the sums of the losses.

        Raises GroupLostError if a group was lost. The step must then not update the weights.
        """
        return losses

    def _finish_group_step(self) -> None:
        """Synchronize the weights after the update of a step, if that is due."""

    def _must_read_again(self, inputs: StepInput) -> bool:
        """Return True if the inputs are not the next samples of this replica group."""
        return inputs.position != self.progress.position

    # ---- logs and rows

    def _log_initial_weights(self) -> None:
        """Log a hash of the weights that is equal on every topology. A collective."""
        hashes = self.world.step_group.gather_objects(sum(map(weight_hash, self.parts)))
        source = f"{self.start.path} (upcycled) and " if self.start.upcycles else ""
        logger.info(
            f"Initial weights from {source}seed {self.seed}, hash {sum(hashes) % 2**64:016x} "
            "on any topology"
        )

    def _observe_rows(self) -> ReplayBundleWriter:
        """Observe the rows of metrics.jsonl: non-finite steps, spikes, the plan. On rank 0."""
        replay_bundles = ReplayBundleWriter(
            self.attempt,
            self.checkpointer,
            self.batches,
            self.start,
            seed=self.seed,
            policy=self.config.resilience.on_nonfinite,
            failures=self.failures,
        )
        spikes = SpikeDetector(
            self.config.resilience,
            write_event=self.attempt.event,
            pin_before=self.checkpointer.pin_before,
            write_bundle=replay_bundles.write_spike,
        )
        self.metrics.observers += [
            replay_bundles.observe,
            spikes.observe,
            self.guard.reruns.observe,
        ]
        settings = settings_of(self.config.model_dump(exclude_none=True), self.world.size)
        plan = find_plan(self.attempt.run, self.config.job.config_file, settings, self.failures)
        if plan is not None:
            check = PlanCheck(
                plan,
                self.attempt.event,
                self.start.step + 1,
                measures_memory=self.world.device.type == "cuda",
            )
            self.metrics.observers.append(check.observe)
        return replay_bundles

    def _rewind_metrics(self) -> None:
        """Move rows after the loaded step out of metrics.jsonl. On rank 0."""
        path, manifest = self.start.path, self.start.manifest
        is_own = path is not None and path.parent == self.checkpointer.folder
        is_resumed = self.start.kind == "resume" and is_own
        with storage_error(self.attempt.run):
            self.metrics.rewind(self.progress.step, (manifest or {}) if is_resumed else None)

    def _log_geometry(self) -> None:
        """Log the sizes of a step."""
        training, geometry = self.config.training, self.run.geometry
        num_tokens = geometry.global_batch_size * training.seq_len
        names = [supply.key for supply in self.batches.order.supplies if supply.key]
        data = ", ".join(names) or str(training.dataset_path or training.dataset)
        log = log_file(self.attempt.folder, self.world.rank)
        logger.info(
            f"Trainer is initialized with local batch size {training.local_batch_size}, "
            f"global batch size {geometry.global_batch_size} "
            f"(= local x data parallel {geometry.num_data_ranks} x accumulation), "
            f"gradient accumulation steps {geometry.num_micro_batches}, "
            f"sequence length {training.seq_len} ({num_tokens:,} tokens per step), "
            f"total steps {training.steps} (warmup {self.optim.schedule.warmup_steps})",
            extra=on_screen(facts_of(self.run, data, self.progress.step + 1, log)),
        )

    # ---- loop

    def train(self) -> ExitCode:
        """Run all steps, or until the ranks agree to stop. Return the cause of the end."""
        config, first_step = self.config, self.progress.step + 1
        if config.checkpoint.create_seed_checkpoint:
            self.save([Save("full", self.checkpointer.folder, is_last=True)])
            return ExitCode.DONE
        logger.info(f"Training starts at step {first_step}")
        if self.is_leader:
            self.attempt.event(
                "start",
                step=self.progress.step,
                source=self.start.kind,
                began=process_start_time(),
                num_ranks=self.world.size,
                layout=self.world.dims.layout(),
            )
        self.garbage.freeze()
        profiling = maybe_profile(
            config.profiling,
            self.attempt.run,
            self.world.rank,
            self.progress.step,
            self.world.step_group.barrier,
            self.failures,
        )
        self.requests.defer_signals = True
        self.guard.update_gate.start_holding()
        self.position.stall_seconds = 0.8 * config.comm.init_timeout_seconds
        self.heartbeat.start()
        with profiling as profiler:
            self.read_batch = profiler.annotate(DATA_WAIT, self.read_batch)
            following, is_warmup, last_profiled = self.fetch(first_step), True, 0
            while True:
                agreement = following.agreement.wait()
                requests = agreement.requests
                if self._must_read_again(following) and Request.DATA_EXHAUSTED in requests:
                    requests.remove(Request.DATA_EXHAUSTED)
                stop = first_stop(requests)
                is_end = self.is_finished or stop is Request.DATA_EXHAUSTED
                if stop in (None, Request.DATA_EXHAUSTED) and (
                    is_end or Request.RUN_AGAIN in requests
                ):
                    step = self.progress.step
                    if held := self._forget_held():
                        self._request_again(requests)
                        self.guard.reruns.repeat(held, step - self.progress.step, following)
                        following = self.fetch(self.progress.step + 1)
                        continue
                if stop is not None or self.is_finished:
                    break
                following, agreement = self._join_groups(following, agreement)
                if following.batch is None:
                    stop = Request.DATA_EXHAUSTED
                    break
                step = self.progress.step + 1
                self.garbage.run(step)
                current, following = following, self.fetch(step + 1)
                self.guard.reruns.keep(current)
                try:
                    record = self.train_step(step, current, agreement)
                except GroupLostError:  # train on the same samples again
                    continue
                except WrongGradientsError as error:  # on every rank
                    logger.error(str(error))
                    stop = Request.BAD_NUMBERS
                    break
                self._finish_group_step()
                if self.progress.step != step:  # continue from the state of another replica group
                    continue
                self.metrics.record(record)
                saves = self.checkpointer.due(
                    step,
                    config.training.steps,
                    Request.SAVE in requests,
                    Request.EXPORT in requests,
                )
                is_logged, is_validated = self.metrics.due(step), self._is_validation_due(step)
                # A held step runs again. The host waits for the device only where it does so anyway.
                needs_host = is_logged or is_validated or bool(saves)
                is_held = needs_host and self.guard.update_gate.is_held()
                if is_logged and not is_held:
                    self.guard.check_overflow()
                    self.metrics.log(step, self._expert_row())
                if step > last_profiled:  # a step that runs again is in the profile of the next one
                    profiler.step()
                    last_profiled = step
                if is_warmup:
                    self._finish_warmup()
                    is_warmup = False
                if is_held:
                    self._request_again(requests)
                    continue
                if not saves and is_logged and self.guard.replicas.are_due(step):
                    self.guard.replicas.check(step)
                if saves and self.guard.update_gate.last_good_progress() is None:
                    self.save(saves)
                if is_validated:
                    self.validate(step)
        # Requests that arrived after the last step's all-reduce, for example during a validation.
        requests += decode_requests(self._exchange_requests("step").wait())
        return self._finish(None if self.is_finished else stop, Request.EXPORT in requests)

    def _forget_held(self) -> HeldStep | None:
        """Return to the progress before the first held step, and return that step.

        None if updates are not held. Waits for the device.
        """
        held = self.guard.update_gate.release()
        if held is not None:
            self.progress = held.progress
            self.metrics.forget_after(self.progress.step)
            logger.warning(
                f"Step {self.progress.step + 1} has gradient norm {held.grad_norm:.6g}, above "
                f"{held.limit:.4g}. Its update was not made, and the step runs again"
            )
        return held

    def _request_again(self, requests: Sequence[Request]) -> None:
        """Send the requests for checkpoints of a step that runs again."""
        for request in {Request.SAVE, Request.EXPORT}.intersection(requests):
            self.requests.add(request)

    def _expert_row(self) -> Row | None:
        """Return the metrics of the experts at a log step; None for a dense model."""
        if self.optim.balancer is None:
            return None
        return self.expert_metrics.row(**self.optim.balancer.read()._asdict())

    def _finish_warmup(self) -> None:
        """Shorten the time-outs after the first step, which compiles. A collective."""
        self.start_clock.begin(None)
        seconds = self.config.comm.train_timeout_seconds
        self.world.tighten_timeouts(timedelta(seconds=seconds))
        self.position.stall_seconds = 0.8 * seconds
        if self.is_leader:
            modules = self.optim.kept_bytes()
            self.attempt.event(MODULES_EVENT, step=self.progress.step, modules=modules)
        if self.activation_offload is not None:
            self._log_activation_offload(self.activation_offload)

    def _is_validation_due(self, step: int) -> bool:
        if not self.validation_sets:
            return False
        is_regular = step % self.config.validation.freq == 0
        return is_regular or step in (1, self.config.training.steps)

    def _log_activation_offload(self, offload: ActivationOffload) -> None:
        """Log the host memory that offloaded activations took on the fullest node. A collective."""
        offload.checks_memory = False
        local = (platform.node(), offload.peak_bytes, host_memory().available)
        peaks: dict[str, list[int]] = {}
        free: dict[str, int] = {}
        for node, peak, available in self.world.step_group.gather_objects(local):
            peaks.setdefault(node, []).append(peak)
            free[node] = min(available, free.get(node, available))
        node = max(peaks, key=lambda name: sum(peaks[name]))
        logger.info(
            f"Activation offload took {sum(peaks[node]) / GIB:.2f} GiB of host memory on {node} at "
            f"its peak ({len(peaks[node])} ranks, at most {max(peaks[node]) / GIB:.2f} GiB each). "
            f"At least {min(free.values()) / GIB:.2f} GiB are available on each node"
        )

    def train_step(self, step: int, inputs: StepInput, agreement: StepAgreement) -> StepRecord:
        """Run one step on a batch (`StepRunner`), and record progress.

        This method does not wait for the device, except with `[fault_tolerance]` and in steps whose
        gradients are checked. Raises GroupLostError, and updates nothing, if another replica group
        was lost; WrongGradientsError if the check fails.
        """
        batch, before = inputs.batch, self.progress
        assert batch is not None
        num_tokens = batch.num_samples * self.config.training.seq_len
        after = GroupPosition(
            batch.position, chain_digest(before.digest_chain, agreement.data_digest)
        )
        totals = self._exchange(GroupStep(agreement.num_valid_tokens, num_tokens, after))
        num_valid = totals.num_valid_tokens
        self.position.move("step", step)
        losses, local = self.step_runner.compute_gradients(
            step, batch, num_valid, num_tokens=num_tokens
        )
        by_source = count_valid_by_source(local[1], batch.sources, len(self.batches.sources))
        is_trusted = self.guard.are_gradients_right(step)
        losses_of_rank = Losses(losses.loss, losses.by_source, count_valid(local[1]), by_source)
        total = self._reduce(losses_of_rank)
        update = self.step_runner.update(
            num_valid, is_logged=self.metrics.due(step), is_trusted=is_trusted
        )

        self.progress = Progress(
            step=step,
            n_tokens_seen=before.n_tokens_seen + totals.num_tokens,
            position=after.position,
            digest_chain=after.digest_chain,
        )
        self.guard.update_gate.record(self.progress)
        return StepRecord(
            step=step,
            num_tokens=num_tokens,
            num_other_tokens=totals.num_tokens - num_tokens,
            num_valid_tokens=num_valid,
            local_valid_tokens=total.num_labels,
            local_valid_by_source=total.labels_by_source,
            loss_share=total.loss_share,
            mtp_loss_share=losses.mtp,
            loss_by_source=total.loss_by_source,
            grad_norm=update.grad_norm,
            skipped=update.skip,
            lr=self.optim.optimizer.lr,
            group_lr=self.optim.optimizer.group_lr,
            data_digest=agreement.data_digest,
            data_digest_chain=self.progress.digest_chain,
            data_loading_s=inputs.seconds,
            position=before.position,
        )

    def _move_to_micro_batch(self, micro: int) -> None:
        self.position.move("step", self.position.current.step, micro)

    def fetch(self, step: int) -> StepInput:
        """Read the batch of `step` (None after the last) and start the all-reduce of its agreement.

        The next step waits for the all-reduce, which has then finished.
        """
        started, position = time.perf_counter(), self.batches.position
        is_wanted = step <= self.config.training.steps
        batch = None
        try:
            if again := self.guard.reruns.next_input():
                batch, position = again.batch, again.position
            elif is_wanted:
                batch = self.read_batch()
            if is_wanted and batch is None:
                self.requests.add(Request.DATA_EXHAUSTED)
        except CacheWriteError as error:  # perhaps on one rank: all ranks stop before this step
            logger.error(str(error))
            self.requests.add(Request.WRITE_FAILED)
        except ReadInterrupted:
            logger.warning(f"The batch of step {step} is late, and the run stops without it")
        seconds = time.perf_counter() - started
        self._note_requests()
        counts = self.requests.take()
        local = StepAgreement.of_rank(0, 0, counts)
        if batch is not None and self.world.dims.counts_tokens(self.world.rank):
            local = StepAgreement.of_rank(batch.num_valid_tokens, batch.digest, counts)
        return StepInput(batch, send(local, self.world.step_group), seconds, position)

    def _note_requests(self) -> None:
        """Record the requests of this rank to all ranks."""
        own = {
            Request.SAVE_FAILED: self.checkpointer.has_failed(),
            Request.WRITE_FAILED: self.failures.stop_is_due(),
            Request.SAVE: self.is_leader and self.checkpointer.is_overdue(),
        }
        requests = [request for request, is_wanted in own.items() if is_wanted]
        requests += self.guard.requests()
        requests += self.limits.reached()
        requests += self.switches.read() if self.is_leader else []
        for request in requests:
            self.requests.add(request)

    def _exchange_requests(self, phase: str = "validate") -> PendingSum:
        """Start an all-reduce of request counts between steps. The next step sends them again."""
        self._note_requests()
        self.position.move(phase, self.progress.step)
        return self.world.step_group.sum_async(self.requests.counts())

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Compute and log the loss of each validation dataset, unless the ranks agree to stop."""
        self.metrics.flush(step)
        self.position.move("validate", step)
        with self.metrics.throughput.pause():
            self.parts.eval()
            try:
                for name, loss in self._validation_losses():
                    self.metrics.validation(step, *loss, name)
                if self.optim.ema is not None and self.config.ema.validation:
                    with self._averaged_weights():
                        for name, loss in self._validation_losses():
                            self.metrics.validation(step, *loss, f"{name}.ema" if name else "ema")
            except ValidationInterrupted:
                logger.warning(
                    f"Interrupted the validation after step {step}, because the run stops"
                )
            self.parts.train()

    def _validation_losses(self) -> Iterable[tuple[str, DatasetLoss]]:
        return losses_of_datasets(
            self.validation_sets,
            self.parts[0] if self.pipeline is None else self.pipeline.evaluate,
            self.feed,
            self.bytes_of_token,
            self.world.gather_losses,
            self._exchange_requests,
        )

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights, and then its own back."""

        assert self.optim.ema is not None

        def refresh() -> None:
            free_gathered(self.parts)
            self.optim.refresh()

        self.checkpointer.order_updates()
        try:
            with self.optim.ema.applied():
                refresh()
                yield
        finally:
            refresh()

    def save(self, saves: Sequence[Save]) -> None:
        """Save a checkpoint of the current step. Its metrics are on disk before it is published.

        Raises StorageError if they cannot be written. With `checkpoint.on_save_error = "continue"`
        they wait in memory instead. Raises NonFiniteStateError on every rank, and publishes no
        step, if the state holds an inf or nan on any rank.
        """
        if not saves:
            return
        step = self.progress.step
        self.position.move("save", step)
        self.metrics.flush(step)
        if not self.failures.continues:
            self.world.step_group.run_on_leader(self.metrics.check_written)
        self.guard.replicas.check(step)
        with self.metrics.throughput.pause():
            self.garbage.collect("GC collection before checkpoint saving")
            summary = {
                "seed": self.seed,
                "global_batch_size": self.run.geometry.global_batch_size,
                "metrics_bytes": self.metrics.byte_offset(step),
                "numeric": self.numeric,
                "data": self._data_state(),
                "numbers": self.guard.update_gate.state_dict(),
                **asdict(self.progress),
            }
            if self.optim.ema is not None:
                section = self.config.ema
                summary[EMA_KEY] = {"decay": section.decay, "warmup": section.warmup}
            if self.upcycled_from is not None:
                summary["upcycled_from"] = self.upcycled_from
            if extensions := used_extensions(self.config):
                summary["extensions"] = extensions
            content: dict[str, Any] = {
                "config_toml": dump_toml(self.config),
                "summary": summary,
                "on_published": partial(self._published, step),
            }
            if names := self._nonfinite_state():
                path = self.checkpointer.save_nonfinite(step, self.states, **content)
                raise NonFiniteStateError(
                    f"After step {step}, {len(names)} tensors of the run's state hold an inf or "
                    f"nan: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. Expected "
                    f"finite numbers, so step {step} is not published. The state is in {path} for "
                    "study; a restart uses the checkpoint before it. Check the learning rate and "
                    "the machine's memory before you start again"
                )
            self.checkpointer.save(saves, step, self.states, **content)
            self.garbage.collect("GC collection after checkpoint saving")

    def _nonfinite_state(self) -> list[str]:
        """Return the names of saved tensors with an inf or nan on any rank. A collective."""
        named = (
            (f"{key}.{name}", value)
            for key, state in self.states.items()
            for name, value in state.state_dict().items()
            if isinstance(value, torch.Tensor)
        )
        local, group = nonfinite_names(named), self.world.step_group
        if not any(group.sum_async([len(local)]).wait()):
            return []
        return sorted({name for names in group.gather_objects(local) for name in names})

    def _published(self, step: int, save: Save, path: Path, seconds: float) -> None:
        """Write the checkpoint's event, and warn once if the scheduler's grace is too short.

        On rank 0's checkpoint thread.
        """
        form = save.suffix.lstrip(".") or save.kind
        self.attempt.event("save", step=step, path=str(path), form=form, seconds=seconds)
        if form == "full" and (
            warning := self.limits.grace_warning(self.metrics.throughput.step_seconds, seconds)
        ):
            logger.warning(warning)

    # ---- close

    def _finish(self, stop: Request | None, export_requested: bool) -> ExitCode:
        """Save the state for the next start, and write the reason for the end. A collective."""
        self.guard.check_overflow()
        self._forget_held()  # the next start runs the step again
        self.metrics.flush(self.progress.step)
        if stop is Request.TERMINATE and (warning := self.limits.stop_warning()):
            logger.warning(warning)
        good = self.guard.update_gate.last_good_progress()
        if good is not None:
            # Updates were skipped since the last finite step: its weights are unchanged.
            stop = Request.BAD_NUMBERS
            self.progress = good
            weights = f"the weights of step {self.progress.step} are unchanged"
            if not self.optim.optimizer.is_atomic:
                weights = (
                    "some weights may have been updated before the detection, so no checkpoint is "
                    "saved"
                )
            logger.error(
                f"Step {good.step + 1} had a non-finite loss or gradient: {weights}, "
                "and the run stops"
            )
        self.checkpointer.wait()  # a checkpoint in progress may be of this step
        if good is None or self.optim.optimizer.is_atomic:
            saves = self.checkpointer.due_at_end(
                self.progress.step, is_finished=stop is None, export_asked=export_requested
            )
            try:
                self.save(saves)
            except NonFiniteStateError as error:
                stop = Request.BAD_NUMBERS
                logger.error(str(error))
        if stop is None:  # a write may have failed on any rank since the last step
            late = decode_requests(self._exchange_requests("end").wait())
            stop = Request.WRITE_FAILED if Request.WRITE_FAILED in late else None
        code = EXIT_CODES[stop] if stop is not None else ExitCode.DONE
        cause = stop.name.lower() if stop is not None else "last_step"
        if self.replay_bundles is not None and good is not None:
            self.replay_bundles.write(good.step + 1)
        if self.is_leader:
            step = self.progress.step
            self.attempt.event("stop", reason=code.reason, cause=cause, code=int(code), step=step)
        is_done = code is ExitCode.DONE
        logger.info(
            "Training completed" if is_done else f"Training stopped: {code.reason} ({cause})",
            extra=on_screen(),
        )
        return code

    def close(self) -> None:
        """Flush and release files and threads."""
        self.heartbeat.close()
        self.metrics.close()
        self.garbage.close()
        if lost := self.failures.summary():
            logger.warning(f"Failed writes of rank {self.world.rank} by file: {lost}")
        add_file(None)
