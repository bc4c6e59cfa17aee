"""One run, told top to bottom: build -> loop -> close.

`torchrun -m torchtitan_like.train --job.config_file X.toml [--section.key value ...]`, or plain `python -m` for one
process. What happens in a step is `Trainer.train_step`; in what order steps, saves and stops come is `Trainer.train`.
"""

from __future__ import annotations

import json
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_like.process_start import begin_rank

if __name__ == "__main__":  # before the imports below, which take seconds
    begin_rank(sys.argv[1:])

import torch

from torchtitan_like.bad_steps import BadSteps
from torchtitan_like.checkpoint.changes import check_changes, diff_settings
from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.fingerprint import numeric_fingerprint, resume_line
from torchtitan_like.checkpoint.saving import Save
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.stateful import JsonState, ModelState, Progress, Stateful
from torchtitan_like.config import JobConfig, dump_toml
from torchtitan_like.data.batches.batch import Batch, chain, count_valid, count_valid_by_source
from torchtitan_like.data.build import build_train_batches, build_validation_sets
from torchtitan_like.data.errors import CacheWriteError
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.distributed.activation_offload import ActivationOffload
from torchtitan_like.distributed.data_parallel import GradientSync
from torchtitan_like.distributed.determinism import derive_seed, seed_device, seed_everything
from torchtitan_like.distributed.float8 import FLOAT8, after_optimizer_step
from torchtitan_like.distributed.initialize import initialize, weight_hash
from torchtitan_like.distributed.recorder import trace_file
from torchtitan_like.distributed.world import PendingSum, World
from torchtitan_like.feed import Feed
from torchtitan_like.launch import build_metrics, build_model, launch, run_as
from torchtitan_like.models.layers.head import total_of
from torchtitan_like.models.spec import get_spec, has_documents, resolve_args
from torchtitan_like.monitor.attempt import Attempt
from torchtitan_like.monitor.garbage import GarbageCollection
from torchtitan_like.monitor.log import add_file, logger
from torchtitan_like.monitor.metrics import StepRecord
from torchtitan_like.monitor.overflow import OverflowDetector
from torchtitan_like.monitor.profiler import maybe_profile
from torchtitan_like.optim.loss import sum_by_source
from torchtitan_like.optim.optimizer import build_optimizer
from torchtitan_like.optim.schedule import SavedSchedule, build_schedule
from torchtitan_like.resilience.end import end_process
from torchtitan_like.resilience.heartbeat import Heartbeat
from torchtitan_like.resilience.limits import Limits
from torchtitan_like.resilience.numbers import BadNumbers, NonFiniteStateError, nonfinite_names
from torchtitan_like.resilience.replicas import Replicas
from torchtitan_like.resilience.requests import EXIT_CODES, Request, Requests, agreed, stop_among
from torchtitan_like.resilience.spikes import SpikeWatch
from torchtitan_like.resilience.switches import Switches
from torchtitan_like.util.credentials import mask_values
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.files import WriteFailures, storage_error, write_atomically
from torchtitan_like.util.host_memory import GIB, host_memory
from torchtitan_like.util.run_directory import log_file
from torchtitan_like.validation import BrokenOff, losses_of_texts


@dataclass
class Fetched:
    """The next step's batch (None: there is none) and the all-reduce that tells what all ranks know of it."""

    batch: Batch | None
    agreement: PendingSum
    seconds: float


class Trainer:
    """Builds a run from a config; `train` then makes its steps. Order matters and is the order of the lines below."""

    def __init__(
        self, config: JobConfig, world: World, checkpointer: Checkpointer, starts: list[Start], requests: Requests
    ) -> None:
        self.config = config
        self.requests = requests
        self.world = world
        self.checkpointer = checkpointer
        self.starts = starts  # to be tried in this order
        self.is_leader = world.rank == 0
        self.failures = WriteFailures(goes_on=config.checkpoint.on_save_error == "continue")
        self._prepare_run_directory()
        self._consider(starts[0])
        self._prepare_randomness()
        self._build_data()
        self._build_model()
        self._build_optimizer()
        self._build_monitor()
        self._load()

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.config.training.steps

    # ---- build

    def _prepare_run_directory(self) -> None:
        """The folder that explains the run, then its seed."""
        folder = self.config.job.dump_folder

        def make() -> int:
            with storage_error(folder):
                made = Attempt(folder)
                made.write_config(dump_toml(self.config))
                if name := self.config.job.save_config_file:
                    text = json.dumps(mask_values(self.config.model_dump()), indent=2)
                    (made.run / name).parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(made.run / name, text)
                made.remove_exit()
                return made.number

        number = self.world.step_group.leader_does(make)
        self.attempt = Attempt(folder, number, failures=self.failures)
        if self.is_leader:
            self.attempt.capture_environment()
        add_file(log_file(self.attempt.folder, self.world.rank), self.failures)
        trace = trace_file(self.config.comm, self.attempt.run, self.world.rank)
        self.heartbeat = Heartbeat(
            self.attempt.folder,
            self.world.rank,
            num_ranks=self.world.size,
            trace=trace,
            failures=self.failures,
        )

    def _consider(self, start: Start) -> None:
        """Say what the run is about to start from; refuse it when settings that make the run have changed since."""
        self.start, self.progress = start, Progress(step=start.step)
        logger.info(str(start))
        config, dims = self.config, self.world.dims
        self.differences = [f"{part} not loaded" for part in config.checkpoint.exclude_from_loading]
        per_micro_batch = config.training.local_batch_size * dims.dp
        wanted = config.training.global_batch_size
        self.global_batch_size = wanted if wanted > 0 else per_micro_batch
        self.num_micro_batches = self.global_batch_size // per_micro_batch
        stored = start.manifest or {}
        if start.kind == "resume" and "config" in stored:
            now = {"global_batch_size": self.global_batch_size}
            changes = diff_settings(stored["config"], config.model_dump(), stored, now)
            if note := check_changes(changes):
                logger.info(note)
            if reordered := changes.reordered():
                logger.warning(
                    "The order of the samples differs from that of the run that saved the checkpoint: "
                    f"{'; '.join(reordered)}"
                )
            self.differences += changes.accepted()

    def _prepare_randomness(self) -> None:
        """One seed, from which all randomness is a function."""
        chosen = self.config.debug.seed if self.config.debug.seed is not None else self.start.seed
        drawn = chosen if chosen is not None else secrets.randbits(31)
        self.seed: int = self.world.step_group.broadcast_object(drawn)
        logger.info(f"Seed: {self.seed}" + ("" if self.config.debug.seed is not None else " (debug.seed is unset)"))
        seed_everything(self.seed)
        self.garbage = GarbageCollection(self.config.training.gc_freq, self.config.training.gc_debug)

    def _build_data(self) -> None:
        """Tokenizer and the stream of batches, at a global position."""
        config, model, dims = self.config, self.config.model, self.world.dims
        self.spec = get_spec(model.name)
        self.args = resolve_args(self.spec, model.flavor, model.args)
        tokenizer = load_tokenizer(config.model.tokenizer_folder)
        self.bytes_of_token = torch.tensor(tokenizer.num_bytes())
        shared: dict[str, Any] = {
            "tokenizer": tokenizer,
            "dump_folder": config.job.dump_folder,
            "dp_rank": dims.dp_coordinate(self.world.rank),
            "dp_size": dims.dp,
            "with_positions": has_documents(self.args),
            "group": self.world.step_group,
            "is_recorder": dims.counts_tokens(self.world.rank),
        }
        self.batches = build_train_batches(
            config.training, config.data, seed=self.seed, num_accumulation=self.num_micro_batches, **shared
        )
        self.validation_sets = build_validation_sets(config.validation, config.data, **shared)
        self.batches.check_ranks(self.world.step_group.gather_objects, self.validation_sets)
        stored = (self.start.manifest or {}).get("data")
        if stored and self.start.kind == "resume" and "dataloader" not in config.checkpoint.exclude_from_loading:
            self.batches.check_state(stored)  # before the model is built, which takes minutes

    def _build_model(self) -> None:
        """Build on meta, cut over the mesh, materialise, and give every weight its topology-independent value."""
        config, world, spec, args = self.config, self.world, self.spec, self.args
        name = f"{config.model.name} {config.model.flavor}"
        logger.info(f"Building {name} with {args}")
        logger.info(f"Model {name} size: {spec.num_params(args):,} total parameters")
        num_samples = self.num_micro_batches * config.training.local_batch_size
        built = build_model(config, world, spec, args, num_samples, bool(self.batches.sources))
        self.parts, self.pipeline, context, self.activation_offload, lines = built
        self.feed = Feed(world, context)
        for line in lines:
            logger.info(line)
        watches = config.debug.detect_overflow
        self.overflow = OverflowDetector(self.parts, config.debug, self.heartbeat.place) if watches else None
        if self.start.kind == "scratch" or "model" in config.checkpoint.exclude_from_loading:
            for part in self.parts:
                initialize(part, spec.init_table(args), self.seed)
        self.gradient_sync = GradientSync(self.parts[0], world.dims)
        self.flops_per_token = spec.flops_per_token(args, config.training.seq_len)

    def _build_optimizer(self) -> None:
        section = self.config.optimizer
        self.schedule = build_schedule(self.config.lr_scheduler, self.config.training.steps)
        named = [named for part in self.parts for named in part.named_parameters()]
        self.optimizer = build_optimizer(named, section, self.world.all_ranks)
        self.states: dict[str, Stateful] = {
            "model": ModelState(self.parts),
            "optimizer": self.optimizer,
            "lr_scheduler": SavedSchedule(self.schedule, lambda: self.start.step + 1, section.lr),
            "dataloader": JsonState(
                lambda: self.batches.state_dict(self.progress.position), self.batches.load_state_dict
            ),
            "train_state": JsonState(lambda: asdict(self.progress), self._restore_progress),
        }
        float8 = self.config.quantize.linear.float8 if FLOAT8 in self.config.model.converters else None
        self.after_update = None if float8 is None else after_optimizer_step(self.parts, float8)

    def _build_monitor(self) -> None:
        config, world = self.config, self.world
        names = self.batches.sources
        self.metrics = build_metrics(config, world, self.attempt, self.flops_per_token, names, self.failures)
        self.replicas = Replicas(
            config.resilience.replica_check_freq, world, self.optimizer.named, self.start.step
        )
        self.switches = Switches(self.attempt.run, config.resilience)
        self.limits = Limits(config.resilience, world.device, keeps_time=self.is_leader)
        self.numeric = numeric_fingerprint(config, world.device, world.dims.mesh_shape())

    def _load(self) -> None:
        """Fill the run from its checkpoint, if it starts from one; then say what it is about to do."""
        if self.start.kind == "scratch":
            shares = self.world.step_group.gather_objects(sum(map(weight_hash, self.parts)))
            logger.info(f"Initial weights from seed {self.seed}, hash {sum(shares) % 2**64:016x} on any topology")
        else:
            self.checkpointer.load(self.starts, self.states, consider=self._consider)
            self.garbage.collect("GC collection after checkpoint loading")
        if self.start.kind == "resume":
            stored = (self.start.manifest or {}).get("numeric")
            self.differences += [f"data: {name}" for name in self.batches.changes]
            logger.info(f"Resume: {resume_line(stored, self.numeric, self.differences)}")
        if self.after_update is not None:
            self.after_update()
        # Where the data is, whichever parts of the checkpoint were left out.
        self.progress = replace(self.progress, step=self.start.step, position=self.batches.position)
        # Only now: a start that fails leaves the folder as it was.
        self.checkpointer.claim(self.start, partial(self._published, self.start.step))
        stored = (self.start.manifest or {}) if self.start.kind == "resume" else {}
        # Beside the weights, which offloading keeps on the host: no copy under way stands before the update it gates.
        device = self.optimizer.parameters[0].device
        self.numbers = BadNumbers(self.config.resilience, device, self.progress, stored.get("numbers", {}))
        if self.is_leader:
            known = {"seed": self.seed, "policy": self.config.resilience.on_nonfinite}
            self.bad_steps = BadSteps(
                self.attempt, self.checkpointer, self.batches, self.start, known, self.failures
            )
            spikes = SpikeWatch(
                self.config.resilience,
                self.attempt.event,
                self.checkpointer.pin_before,
                self.bad_steps.keep_spike,
            )
            self.metrics.observers += [self.bad_steps.look, spikes.look]
        self.metrics.n_tokens_seen = self.progress.n_tokens_seen
        is_own = self.start.path is not None and self.start.path.parent == self.checkpointer.folder

        def rewind() -> None:
            with storage_error(self.attempt.run):
                self.metrics.rewind(self.progress.step, stored if is_own else None)

        self.world.step_group.leader_does(rewind)
        training = self.config.training
        logger.info(
            f"Trainer is initialized with local batch size {training.local_batch_size}, global batch size "
            f"{self.global_batch_size} (= local x data parallel {self.world.dims.dp} x accumulation), gradient "
            f"accumulation steps {self.num_micro_batches}, sequence length {training.seq_len} "
            f"({self.global_batch_size * training.seq_len:,} tokens per step), total steps {training.steps} "
            f"(warmup {self.schedule.warmup_steps})"
        )

    # ---- loop

    def train(self) -> ExitCode:
        """Make steps until the last one or until all ranks agree to stop; returns why it ended."""
        config, first_step = self.config, self.progress.step + 1
        if config.checkpoint.create_seed_checkpoint:
            self.save([Save("full", self.checkpointer.folder, is_last=True)])
            return ExitCode.DONE
        logger.info(f"Training starts at step {first_step}")
        self.garbage.freeze()
        profiling = maybe_profile(
            config.profiling,
            self.attempt.run,
            self.world.rank,
            self.progress.step,
            self.world.step_group.barrier,
            self.failures,
        )
        self.requests.only_note = True
        self.heartbeat.start(0.8 * config.comm.init_timeout_seconds)
        with profiling as profiler:
            fetched = self._fetch(first_step)
            while True:
                sums = fetched.agreement.wait()
                asked = agreed(sums[3:])
                reason = stop_among(asked)
                if reason is not None or self.is_finished:
                    break
                step = self.progress.step + 1
                self.garbage.run(step)
                current, fetched = fetched, self._fetch(step + 1)
                self.metrics.record(self.train_step(step, current, sums))
                if self.metrics.due(step):
                    if self.overflow is not None:
                        self.overflow.judge()
                    self.metrics.log(step)
                profiler.step()
                if step == first_step:
                    self.world.tighten_timeouts(timedelta(seconds=config.comm.train_timeout_seconds))
                    self.heartbeat.limit = 0.8 * config.comm.train_timeout_seconds
                    if self.activation_offload is not None:
                        self._report_activation_offload(self.activation_offload)
                saves = self.checkpointer.due(
                    step, config.training.steps, Request.SAVE in asked, Request.EXPORT in asked
                )
                if not saves and self.metrics.due(step) and self.replicas.are_due(step):
                    self.replicas.check(step)
                if saves and self.numbers.last_good() is None:
                    self.save(saves)
                if self.validation_sets and (step in (1, config.training.steps) or step % config.validation.freq == 0):
                    self.validate(step)
        asked += agreed(self._ask("step").wait())  # what came too late for a step, as while the last one was validated
        return self._finish(None if self.is_finished else reason, Request.EXPORT in asked)

    def _report_activation_offload(self, offload: ActivationOffload) -> None:
        """After the first step: log the host memory that activations took on the fullest node."""
        offload.checks_memory = False
        memory = host_memory()
        peaks: dict[str, list[int]] = {}
        free: dict[str, int] = {}
        local = (platform.node(), offload.peak_bytes, memory.available)
        for node, peak, available in self.world.step_group.gather_objects(local):
            peaks.setdefault(node, []).append(peak)
            free[node] = min(available, free.get(node, available))
        node = max(peaks, key=lambda name: sum(peaks[name]))
        logger.info(
            f"Activation offload took {sum(peaks[node]) / GIB:.2f} GiB of host memory on {node} at "
            f"its peak ({len(peaks[node])} ranks, at most {max(peaks[node]) / GIB:.2f} GiB each). "
            f"At least {min(free.values()) / GIB:.2f} GiB are available on each node"
        )

    def train_step(self, step: int, fetched: Fetched, sums: list[int]) -> StepRecord:
        """Forward and backward of every micro-batch, one clipped and gated update. Nothing here waits for the device.

        The loss of a micro-batch is the sum of its token losses over the *global* number of valid tokens of the step,
        and gradients are summed over ranks: the update is that of one mean over all tokens, on any topology. The model
        returns the loss itself, chunk by chunk, so that no logits outlive the forward.
        """
        batch, num_valid = fetched.batch, sums[0]
        assert batch is not None
        digest = (sums[1] + (sums[2] << 32)) % 2**64
        lr = self.optimizer.peak_lr * self.schedule.factor(step)
        self.optimizer.set_lr(lr)
        self.optimizer.zero_grad()
        self.heartbeat.beat("step", step)
        if not self.optimizer.is_atomic:  # the backward updates
            self.checkpointer.order_updates()
        local = self.feed.local(batch)
        num_sources = len(self.batches.sources)
        loss_by_source = torch.zeros(num_sources, dtype=torch.float64, device=self.world.device)
        sources = self.world.to_device(batch.sources) if num_sources else None
        if self.pipeline is not None:
            seed = derive_seed(self.seed, batch.first_samples[0], self.pipeline.stage_numbers)
            seed_device(seed, self.world.device)
            loss, token_losses = self.pipeline.step(*self.feed.to_device(local, slice(None)), max(1, num_valid))
            if sources is not None and token_losses is not None:
                loss_by_source = sum_by_source(token_losses, sources.flatten(), num_sources)
        else:
            losses: list[torch.Tensor] = []
            for micro in range(len(batch.first_samples)):
                self.gradient_sync.prepare(is_last=micro == len(batch.first_samples) - 1)
                self.heartbeat.beat("step", step, micro)
                seed_device(derive_seed(self.seed, batch.first_samples[micro]), self.world.device)
                output = self.parts[0](*self.feed.to_device(local, micro))
                if sources is not None:
                    loss_by_source = loss_by_source + sum_by_source(output.tokens, sources[micro], num_sources)
                share = total_of(output) / max(1, num_valid)
                # A non-finite loss must reach every gradient, and so the global norm, on every rank.
                losses.append(share.detach())
                share.backward(losses[-1] * 0 + 1)  # 1, or NaN
            loss = sum(losses[1:], start=losses[0])

        grad_norm = self.optimizer.clip_gradients(self.config.training.max_norm)
        skip = self.numbers.gate(grad_norm)
        self.checkpointer.order_updates()
        self.optimizer.step(skip=skip)
        if self.after_update is not None:
            self.after_update()

        before = self.progress
        num_tokens = batch.num_samples * self.config.training.seq_len
        self.progress = Progress(
            step, before.n_tokens_seen + num_tokens, batch.position, chain(before.digest_chain, digest)
        )
        self.numbers.passed(self.progress)
        return StepRecord(
            step=step,
            num_tokens=num_tokens,
            num_valid_tokens=num_valid,
            local_valid_tokens=count_valid(local[1]),
            local_valid_by_source=count_valid_by_source(local[1], batch.sources, num_sources),
            loss_share=loss,
            loss_by_source=loss_by_source,
            grad_norm=grad_norm,
            skipped=skip,
            lr=lr,
            data_digest=digest,
            data_digest_chain=self.progress.digest_chain,
            data_loading_s=fetched.seconds,
            position=before.position,
        )

    def _fetch(self, step: int) -> Fetched:
        """The batch of `step` (none beyond the last) and, under way, the step's one bookkeeping all-reduce.

        On the wire (int64, summed): valid tokens and the two halves of the data digest, counted once per data shard,
        then one count per `Request`. It is waited for one step later, when it has long arrived.
        """
        begin = time.perf_counter()
        wanted = step <= self.config.training.steps
        batch = None
        try:
            batch = next(self.batches, None) if wanted else None
            if wanted and batch is None:
                self.requests.note(Request.DATA_EXHAUSTED)
        except CacheWriteError as error:  # perhaps on this rank alone: all ranks stop before this step
            logger.error(str(error))
            self.requests.note(Request.WRITE_FAILED)
        seconds = time.perf_counter() - begin
        self._look_for_requests()
        counted = [0, 0, 0]
        if batch is not None and self.world.dims.counts_tokens(self.world.rank):
            counted = [batch.num_valid_tokens, batch.digest & 0xFFFFFFFF, batch.digest >> 32]
        return Fetched(batch, self.world.step_group.sum_async(counted + self.requests.take()), seconds)

    def _look_for_requests(self) -> None:
        """Note what this rank has to ask of all."""
        asked = {
            Request.BAD_NUMBERS: self.numbers.have_halted(),
            Request.SAVE_FAILED: self.checkpointer.has_failed(),
            Request.WRITE_FAILED: self.failures.stop_is_due(),
            Request.SAVE: self.is_leader and self.checkpointer.is_overdue(),
        }
        found = [request for request, is_asked in asked.items() if is_asked] + self.limits.reached()
        for request in found + (self.switches.read() if self.is_leader else []):
            self.requests.note(request)

    def _ask(self, phase: str = "validate") -> PendingSum:
        """This rank's requests to all, apart from a step's; they are sent with the next one's all the same."""
        self._look_for_requests()
        self.heartbeat.beat(phase, self.progress.step)
        return self.world.step_group.sum_async(self.requests.noted())

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """The loss of each validation text's fixed samples; none when the run is to stop meanwhile."""
        self.metrics.flush(step)
        self.heartbeat.beat("validate", step)
        with self.metrics.pause():
            self.parts.eval()
            evaluate = self.parts[0] if self.pipeline is None else self.pipeline.evaluate
            per_text = losses_of_texts(
                self.validation_sets, evaluate, self.feed, self.bytes_of_token, self.world.gather_losses, self._ask
            )
            try:
                for name, found in per_text:
                    self.metrics.validation(step, *found, name)
            except BrokenOff:
                logger.warning(f"The validation after step {step} is broken off: the run is to stop")
            self.parts.train()

    def save(self, saves: Sequence[Save]) -> None:
        """Save where the run is now. Metrics up to here are on disk before it is visible.

        Raises StorageError if they cannot be written; with `checkpoint.on_save_error = "continue"` they wait in memory.
        Raises NonFiniteStateError on every rank, and publishes no step, if the state holds an inf
        or nan on any rank.
        """
        if not saves:
            return
        step = self.progress.step
        self.heartbeat.beat("save", step)
        self.metrics.flush(step)
        if not self.failures.goes_on:
            self.world.step_group.leader_does(self.metrics.check_written)
        self.replicas.check(step)
        with self.metrics.pause():
            self.garbage.collect("GC collection before checkpoint saving")
            summary = {
                "seed": self.seed,
                "global_batch_size": self.global_batch_size,
                "metrics_bytes": self.metrics.byte_offset(step),
                "numeric": self.numeric,
                "data": self.batches.state_dict(self.progress.position),
                "numbers": self.numbers.state_dict(),
                **asdict(self.progress),
            }
            content: dict[str, Any] = {
                "config_toml": dump_toml(self.config),
                "summary": summary,
                "on_published": partial(self._published, step),
            }
            if names := self._nonfinite_state():
                path = self.checkpointer.save_nonfinite(step, self.states, **content)
                raise NonFiniteStateError(
                    f"After step {step}, {len(names)} tensors of the run's state hold an inf or nan: "
                    f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. Expected finite "
                    f"numbers, so step {step} is not published. The state is in {path} for study; a "
                    "restart uses the checkpoint before it. Check the learning rate and the "
                    "machine's memory before you start again"
                )
            self.checkpointer.save(saves, step, self.states, **content)
            self.garbage.collect("GC collection after checkpoint saving")

    def _nonfinite_state(self) -> list[str]:
        """Names of the tensors to save that hold an inf or nan on any rank; a collective."""
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
        """On rank 0's checkpoint thread: note the save, and whether the scheduler's grace is enough for another one."""
        form = save.suffix.lstrip(".") or save.kind
        self.attempt.event("save", step=step, path=str(path), form=form, seconds=seconds)
        if form == "full" and (warning := self.limits.grace_warning(self.metrics.step_seconds, seconds)):
            logger.warning(warning)

    # ---- close

    def _finish(self, reason: Request | None, export_asked: bool) -> ExitCode:
        """Leave on disk what the next start needs, and say why this one ended."""
        if self.overflow is not None:
            self.overflow.judge()
        self.metrics.flush(self.progress.step)
        good = self.numbers.last_good()
        if good is not None:
            # No weight has changed since: that is the point to save and to go back to.
            reason = Request.BAD_NUMBERS
            self.progress = good
            weights = f"the weights are those of step {self.progress.step}"
            if not self.optimizer.is_atomic:
                weights = "some weights may have been updated before it showed, so nothing is saved"
            logger.error(f"Step {good.step + 1} had a non-finite loss or gradient: {weights}, and the run stops")
        self.checkpointer.wait()  # a save under way may be of this very step
        if good is None or self.optimizer.is_atomic:
            step, is_finished = self.progress.step, reason is None
            saves = self.checkpointer.due_at_end(step, is_finished=is_finished, export_asked=export_asked)
            try:
                self.save(saves)
            except NonFiniteStateError as error:
                reason = Request.BAD_NUMBERS
                logger.error(str(error))
        if reason is None and Request.WRITE_FAILED in agreed(self._ask("end").wait()):
            reason = Request.WRITE_FAILED  # since the last step, on any rank
        code = EXIT_CODES[reason] if reason is not None else ExitCode.DONE
        cause = reason.name.lower() if reason is not None else "last_step"
        if self.is_leader:
            if good is not None:
                self.bad_steps.keep(good.step + 1)
            self.attempt.event("stop", reason=code.reason, cause=cause, code=int(code), step=self.progress.step)
        logger.info("Training completed" if code is ExitCode.DONE else f"Training stopped: {code.reason} ({cause})")
        return code

    def close(self) -> None:
        """Flush and release what the run holds."""
        self.heartbeat.close()
        self.metrics.close()
        self.garbage.close()
        if lost := self.failures.summary():
            logger.warning(f"Failed writes of rank {self.world.rank} by file: {lost}")
        add_file(None)

    def _restore_progress(self, state: dict[str, Any]) -> None:
        self.progress = Progress(**state)


run = partial(run_as, Trainer)


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    return launch(argv, run)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
