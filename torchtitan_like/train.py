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

    from torchtitan_like.run import run_rank

    run_rank(command_line)

import time
from collections.abc import Callable, Sequence
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
    log_initial_weights,
)
from torchtitan_like.checkpoint.saving import RunRecord, Save
from torchtitan_like.checkpoint.stateful import (
    JsonState,
    ModelState,
    Progress,
    Stateful,
)
from torchtitan_like.data.batches.batch import (
    Batch,
    chain_digest,
    count_valid,
    count_valid_by_source,
)
from torchtitan_like.data.data_errors import CacheWriteError, DataMismatch, ReadInterrupted
from torchtitan_like.distributed.replica_groups import (
    GroupLostError,
    GroupMismatch,
    GroupPosition,
    GroupStep,
    Losses,
    common_position,
)
from torchtitan_like.guard import Guard
from torchtitan_like.monitor.log import add_file, logger
from torchtitan_like.monitor.profiler import maybe_profile
from torchtitan_like.monitor.rows import StepRecord
from torchtitan_like.resilience.agreement import (
    EXIT_CODES,
    PendingAgreement,
    Request,
    StepAgreement,
    Switches,
    first_stop,
    send,
)
from torchtitan_like.resilience.corruption import WrongGradientsError
from torchtitan_like.resilience.limits import Limits, process_start_time
from torchtitan_like.resilience.nonfinite import (
    HeldStep,
    NonFiniteStateError,
    nonfinite_state,
)
from torchtitan_like.resolved import RankRun, log_sizes
from torchtitan_like.step import StepRunner
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.validation import Validation, ValidationInterrupted


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

    def __init__(self, run: RankRun) -> None:
        """Build all parts, and load the first undamaged start of `run.origin`.

        A collective. Raises each `RunFailure` on every rank.
        """
        config = run.config
        self.run = run
        self.config = config
        self.world = run.world
        self.checkpointer = run.checkpointer
        self.requests = run.requests
        self.position = run.position
        self.attempt = run.attempt
        self.origin = run.origin
        self.garbage = run.garbage
        self.is_leader = run.world.rank == 0
        self.progress = Progress(step=run.origin.start.step)

        # The data is checked against the checkpoint before the model is built, which takes minutes.
        data = build_data(run)
        self.batches = data.batches
        self.read_batch: Callable[[], Batch | None] = partial(next, self.batches, None)
        self.model = build_model(run, data)
        self.parts = self.model.parts
        self.optim = build_optimization(run, self.parts, run.world, run.seed)
        for line in self.optim.describe():
            logger.info(line)
        self.validation = Validation(run, data, self.model, self.optim)
        self._connect_groups()
        self.metrics = build_metrics(
            run, sources=self.batches.sources, expert_layers=self.optim.expert_layers
        )
        self.switches = Switches(self.attempt.run, config.resilience)
        self.limits = Limits(config.resilience, run.world.device, is_leader=self.is_leader)

        self.states = self._states()
        self._load()
        self.guard: Guard[StepInput] = Guard(
            run, self.parts, self.optim, self.batches, self.metrics, self.progress
        )
        self.step_runner = StepRunner(
            run.world,
            run.seed,
            self.model,
            self.optim,
            self.guard.gate,
            config.training.max_norm,
            num_sources=len(self.batches.sources),
            on_micro_batch=self._move_to_micro_batch,
            order_updates=self.checkpointer.order_updates,
            gradient_check=self.guard.gradient_check,
            captures=config.compile.cuda_graphs,
        )

        # Metrics continue after the last row of the loaded step.
        self.metrics.n_tokens_seen = self.progress.n_tokens_seen
        manifest = self.origin.own_manifest(self.checkpointer.folder)
        run.world.step_group.run_on_leader(
            partial(self.metrics.rewind, self.progress.step, manifest)
        )
        names = [supply.key for supply in self.batches.order.supplies if supply.key]
        log_sizes(run, names, self.progress.step + 1, self.optim.schedule.warmup_steps)
        run.clock.begin_next()

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.config.training.steps

    # ---- start

    def _load(self) -> None:
        """Load the first undamaged start. If that fails, the checkpoint folder is unchanged."""
        loaded: list[str] = []
        is_new = self.origin.is_new  # new weights are in the model
        if self.origin.start.kind != "scratch":
            loaded = self.checkpointer.load(
                self.origin.starts, self.states, on_fallback=self.origin.start_from
            )
            self.garbage.collect("GC collection after checkpoint loading")
        start = self.origin.start
        if is_new:
            log_initial_weights(self.run, self.parts)
        self.origin.log_resume(self.batches.changes)
        self.optim.after_load(loaded, start.step)
        # The position of the data is restored, even if parts of the checkpoint were excluded.
        self.progress = replace(self.progress, step=start.step, position=self.batches.position)
        self.checkpointer.claim(start, self._published)

    def _states(self) -> dict[str, Stateful]:
        """Return the states of a checkpoint, by the names of `checkpoint.exclude_from_loading`."""

        def restore_progress(state: dict[str, Any]) -> None:
            self.progress = Progress(**state)

        return {
            "model": ModelState(self.parts),
            **self.optim.states(lambda: self.origin.start.step + 1),
            "dataloader": JsonState(self._data_state, self._restore_data),
            "train_state": JsonState(lambda: asdict(self.progress), restore_progress),
            # Last: the order of the keys is the order in a checkpoint's .metadata.
            **self.optim.average_states(),
        }

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
                source=self.origin.start.kind,
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
            self.attempt.failures,
        )
        self.requests.defer_signals = True
        self.guard.update_gate.start_holding()
        self.model.exchange.start_bounding()
        self.position.stall_seconds = 0.8 * config.comm.init_timeout_seconds
        self.run.heartbeat.start()
        with profiling as profiler:
            self.read_batch = profiler.annotate_data(self.read_batch)
            upcoming, is_warmup, last_profiled = self.fetch(first_step), True, 0
            while True:
                agreement = upcoming.agreement.wait()
                requests = agreement.requests
                if self._must_read_again(upcoming) and Request.DATA_EXHAUSTED in requests:
                    requests.remove(Request.DATA_EXHAUSTED)
                stop = first_stop(requests)
                is_end = self.is_finished or stop is Request.DATA_EXHAUSTED
                if stop in (None, Request.DATA_EXHAUSTED) and (
                    is_end or Request.RUN_AGAIN in requests
                ):
                    step = self.progress.step
                    if held := self._forget_held("The step runs again"):
                        self.model.exchange.run_next_exactly()
                        self._request_again(requests)
                        self.guard.reruns.repeat(held, step - self.progress.step, upcoming)
                        upcoming = self.fetch(self.progress.step + 1)
                        continue
                if stop is not None or self.is_finished:
                    break
                upcoming, agreement = self._join_groups(upcoming, agreement)
                if upcoming.batch is None:
                    stop = Request.DATA_EXHAUSTED
                    break
                step = self.progress.step + 1
                self.garbage.run(step)
                current, upcoming = upcoming, self.fetch(step + 1)
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
                is_logged, is_validated = self.metrics.due(step), self.validation.is_due(step)
                # A held step runs again. The host waits for the device only where it does so anyway.
                needs_host = is_logged or is_validated or bool(saves)
                is_held = needs_host and self.guard.update_gate.is_held()
                if is_logged and not is_held:
                    self.guard.check_overflow()
                    self.metrics.log(step, self.optim.expert_loads())
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
        requests += self._exchange_requests("step").wait().requests
        return self._finish(None if self.is_finished else stop, Request.EXPORT in requests)

    def _forget_held(self, consequence: str) -> HeldStep | None:
        """Return to the progress before the first held step, and return that step.

        None if updates are not held. Waits for the device. consequence: the end of the log line.
        """
        held = self.guard.update_gate.release()
        if held is not None:
            self.progress = held.progress
            self.metrics.forget_after(self.progress.step)
            step = self.progress.step + 1
            if held.overflow:
                line = self.model.exchange.note_overflow(step, held.overflow)
                logger.info(f"{line}. {consequence}")
            else:
                logger.warning(
                    f"Step {step} has gradient norm {held.grad_norm:.6g}, above "
                    f"{held.limit:.4g}. Its update was not made. {consequence}"
                )
        return held

    def _request_again(self, requests: Sequence[Request]) -> None:
        """Send the requests for checkpoints of a step that runs again."""
        for request in {Request.SAVE, Request.EXPORT}.intersection(requests):
            self.requests.add(request)

    def _finish_warmup(self) -> None:
        """Shorten the time-outs after the first step, which compiles. A collective."""
        self.run.clock.begin_next()
        seconds = self.config.comm.train_timeout_seconds
        self.world.tighten_timeouts(timedelta(seconds=seconds))
        self.position.stall_seconds = 0.8 * seconds
        if self.is_leader:
            modules = self.optim.kept_bytes()
            self.attempt.event("memory", step=self.progress.step, modules=modules)
        self.model.finish_warmup(self.world.step_group)

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
            Request.WRITE_FAILED: self.attempt.failures.stop_is_due(),
            Request.SAVE: self.is_leader and self.checkpointer.is_overdue(),
        }
        requests = [request for request, is_wanted in own.items() if is_wanted]
        requests += self.guard.requests()
        requests += self.limits.reached()
        requests += self.switches.read() if self.is_leader else []
        for request in requests:
            self.requests.add(request)

    def _exchange_requests(self, phase: str = "validate") -> PendingAgreement:
        """Start an all-reduce of request counts between steps. The next step sends them again."""
        self._note_requests()
        self.position.move(phase, self.progress.step)
        local = StepAgreement.of_rank(0, 0, self.requests.counts())
        return send(local, self.world.step_group)

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Compute and log the loss of each validation dataset, unless the ranks agree to stop."""
        self.metrics.flush(step)
        self.position.move("validate", step)
        with self.metrics.throughput.pause():
            try:
                for name, loss in self.validation.losses(self._exchange_requests):
                    self.metrics.validation(step, *loss, name)
            except ValidationInterrupted:
                logger.warning(
                    f"Interrupted the validation after step {step}, because the run stops"
                )

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
        if not self.attempt.failures.continues:
            self.world.step_group.run_on_leader(self.metrics.check_written)
        self.guard.replicas.check(step)
        with self.metrics.throughput.pause():
            self.garbage.collect("GC collection before checkpoint saving")
            summary = {
                "seed": self.run.seed,
                "global_batch_size": self.run.geometry.global_batch_size,
                "metrics_bytes": self.metrics.byte_offset(step),
                "numeric": self.origin.numeric,
                "data": self._data_state(),
                "numbers": self.guard.update_gate.state_dict(),
                **asdict(self.progress),
                **self.optim.summary(),
                **self.origin.summary(),
            }
            record = RunRecord(step, self.run.config_toml, summary)
            if names := nonfinite_state(self.states, self.world.step_group):
                path = self.checkpointer.save_nonfinite(record, self.states)
                raise NonFiniteStateError(step, names, path)
            self.checkpointer.save(saves, record, self.states)
            self.garbage.collect("GC collection after checkpoint saving")

    def _published(self, step: int, save: Save, path: Path, seconds: float) -> None:
        """Write the checkpoint's event, and warn once if the scheduler's grace is too short.

        On rank 0's checkpoint thread.
        """
        form = save.suffix.lstrip(".") or save.kind
        self.attempt.event("save", step=step, path=str(path), form=form, seconds=seconds)
        if form == "full":
            self.limits.check_grace(self.metrics.throughput.step_seconds, seconds)

    # ---- close

    def _finish(self, stop: Request | None, export_requested: bool) -> ExitCode:
        """Save the state for the next start, and write the reason for the end. A collective."""
        self.guard.check_overflow()
        self._forget_held("The next start runs the step again")
        self.metrics.flush(self.progress.step)
        if stop is Request.TERMINATE:
            self.limits.warn_of_untested_grace()
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
            late = self._exchange_requests("end").wait().requests
            stop = Request.WRITE_FAILED if Request.WRITE_FAILED in late else None
        code = EXIT_CODES[stop] if stop is not None else ExitCode.DONE
        cause = stop.name.lower() if stop is not None else "last_step"
        if good is not None:
            self.guard.write_bundle(good.step + 1)
        self.attempt.end(code, cause, self.progress.step, is_leader=self.is_leader)
        return code

    def close(self) -> None:
        """Flush and release files and threads."""
        self.run.heartbeat.close()
        self.metrics.close()
        self.garbage.close()
        if lost := self.attempt.failures.summary():
            logger.warning(f"Failed writes of rank {self.world.rank} by file: {lost}")
        add_file(None)
