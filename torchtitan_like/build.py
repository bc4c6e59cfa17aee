"""Build the parts of a run from sections of its configuration, for `Trainer.__init__`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from torchtitan_like.checkpoint.checkpointer import Checkpointer
from torchtitan_like.checkpoint.fingerprint import numeric_fingerprint
from torchtitan_like.checkpoint.identity import Identity, SpecialToken
from torchtitan_like.checkpoint.origin import Origin
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.config.problems import ConfigError, Problem
from torchtitan_like.data.batches.iterators import TrainBatches, ValidationBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.distributed.data_parallel import DTYPES
from torchtitan_like.distributed.determinism import seed_everything
from torchtitan_like.distributed.float8 import FLOAT8, HARDLY_FASTER, after_optimizer_step
from torchtitan_like.distributed.initialize import initialize, weight_hash
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.distributed.parallelize import Sections, ShardedModel, build_parts
from torchtitan_like.distributed.recorder import trace_file
from torchtitan_like.distributed.row_exchange import RowExchange
from torchtitan_like.distributed.world import World
from torchtitan_like.extensions.protocols import Settings
from torchtitan_like.extensions.user_code import ExtensionError, Observers, resolve_name
from torchtitan_like.models.argument_rules import slow_attention
from torchtitan_like.models.layers import kernels
from torchtitan_like.models.layers.grouped_linear import select_product
from torchtitan_like.models.layers.moe import describe_experts, force_round_robin_routing
from torchtitan_like.models.spec import (
    describe_size,
    fit_positions,
    get_spec,
    has_documents,
    needs_positions,
    resolve_args,
)
from torchtitan_like.monitor.attempt import open_attempt
from torchtitan_like.monitor.experts import ExpertMetrics
from torchtitan_like.monitor.garbage import GarbageCollection
from torchtitan_like.monitor.log import logger
from torchtitan_like.monitor.memory import build_memory_monitor
from torchtitan_like.monitor.metrics import Metrics
from torchtitan_like.monitor.plan_check import observe_plan
from torchtitan_like.monitor.reference_curve import build_reference
from torchtitan_like.monitor.rows import RowCollector, RowFiles
from torchtitan_like.monitor.sinks import build_sinks
from torchtitan_like.monitor.start_clock import StartClock
from torchtitan_like.monitor.throughput import ThroughputClock, TokenFlops, log_hardware
from torchtitan_like.optim.balancing import ExpertBalancer
from torchtitan_like.optim.ema import AveragedWeights
from torchtitan_like.optim.loss import TokenLoss, VocabShards, chunked_cross_entropy
from torchtitan_like.optim.optimization import Optimization
from torchtitan_like.optim.optimizer import OptimizerContext, build_optimizer
from torchtitan_like.optim.schedule import build_schedule
from torchtitan_like.resilience.agreement import Requests
from torchtitan_like.resilience.heartbeat import Heartbeat, RankPosition
from torchtitan_like.resilience.nonfinite import UpdateGate, holds_high_norms
from torchtitan_like.resolved import RankRun, Run
from torchtitan_like.util.credentials import mask_values
from torchtitan_like.util.files import WriteFailures
from torchtitan_like.util.modules import is_dotted
from torchtitan_like.util.plan_file import settings_of
from torchtitan_like.util.shards import local_positions

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig
    from torchtitan_like.config.sections_run import Resilience
    from torchtitan_like.config.sections_training import Model
    from torchtitan_like.models.spec import ModelSpec

Progress = TypeVar("Progress")  # what the run has trained on; the planner counts steps


# ---- the rank


def attach(
    run: Run,
    world: World,
    checkpointer: Checkpointer,
    starts: Sequence[Start],
    requests: Requests | None = None,
    position: RankPosition | None = None,
    clock: StartClock | None = None,
) -> RankRun:
    """Open the attempt of a run, and return the run of this rank. A collective.

    starts: what it may start from. Without requests, position or clock it has new ones. Raises
    StorageError if rank 0 cannot write, and ChangedError if settings that shape the run have
    changed.
    """
    config, start = run.config, starts[0]
    position = position or RankPosition()
    clock = clock or StartClock(world.rank == 0)
    verb = "compile and run" if config.compile.enable else "run"
    weights = "initialize the weights" if start.kind == "scratch" else "load the weights"
    clock.plan("read the data", "build the model", weights, f"{verb} step {start.step + 1}")
    failures = WriteFailures(continues=config.checkpoint.on_save_error == "continue")
    attempt = open_attempt(config.job, run.config_toml, run.tables, world, failures)
    position.attempt_folder = attempt.folder
    heartbeat = Heartbeat(
        attempt.folder,
        position,
        world.rank,
        num_ranks=world.size,
        trace=trace_file(config.comm, attempt.run, world.rank),
        failures=failures,
    )
    numeric = numeric_fingerprint(config, world.device, world.dims.layout())
    batch_size = run.geometry.global_batch_size
    origin = Origin(starts, run.settings, run.args, numeric, global_batch_size=batch_size)
    seed = _agree_on_seed(config, start, world)
    seed_everything(seed)
    return RankRun(
        **{field.name: getattr(run, field.name) for field in fields(Run)},
        world=world,
        checkpointer=checkpointer,
        requests=requests or Requests(),
        position=position,
        clock=clock,
        garbage=GarbageCollection(config.training.gc_freq, config.training.gc_debug),
        attempt=attempt,
        heartbeat=heartbeat,
        origin=origin,
        seed=seed,
    )


def _agree_on_seed(config: JobConfig, start: Start, world: World) -> int:
    """Return debug.seed, the seed of the resumed run, or a new one. Broadcasts from rank 0."""
    chosen = config.debug.seed
    seed = start.seed if chosen is None else chosen
    if seed is None:  # replica groups start on their own, and need the same seed
        seed = 0 if config.fault_tolerance.enable else secrets.randbits(31)
    seed = int(world.step_group.broadcast_object(seed))
    logger.info(f"Seed: {seed}" + ("" if chosen is not None else " (debug.seed is unset)"))
    return seed


def build_checkpointer(run: Run, world: World) -> Checkpointer:
    """Build the checkpointer of a run."""
    return Checkpointer(
        run.config.checkpoint,
        dump_folder=run.config.job.dump_folder,
        group=world.checkpoint_group,
        device=world.device,
        identity=identity_of(run.spec, run.args, run.config.model),
    )


def identify(model: Model) -> Identity:
    """Return the identity of a configured model, after resolving its sizes."""
    spec = get_spec(model.name)
    return identity_of(spec, resolve_args(spec, model.flavor, model.args), model)


def identity_of(spec: ModelSpec, args: Any, model: Model) -> Identity:
    """Return the model's name and sizes, which checkpoints of other formats do not contain."""

    def special_tokens() -> tuple[SpecialToken | None, SpecialToken | None]:
        tokenizer = load_tokenizer(model.tokenizer_folder)
        ids = (tokenizer.bos_id, tokenizer.eos_id)
        bos, eos = (None if i is None else SpecialToken(tokenizer.decode([i]), i) for i in ids)
        return bos, eos

    folders = Path(model.assets_folder), Path(model.tokenizer_folder)
    return Identity(spec, args, *folders, special_tokens)


# ---- data


@dataclass(frozen=True)
class DataParts:
    """This data rank's share of all batches.

    validation_sets: by name of the dataset. bytes_of_token: (vocab_size,) UTF-8 bytes per token.
    """

    batches: TrainBatches
    validation_sets: dict[str, ValidationBatches]
    bytes_of_token: Tensor


def build_data(run: RankRun) -> DataParts:
    """Build tokenizer, training batches at position 0 and validation batches. A collective.

    A request to stop interrupts their reading. Raises DataMismatch on every rank if the ranks read
    different datasets, or another one than the run to resume.
    """
    config, world = run.config, run.world
    tokenizer = load_tokenizer(config.model.tokenizer_folder)
    builder = DataBuilder(
        config.data,
        tokenizer,
        config.job.dump_folder,
        dp_rank=world.dims.dp_coordinate(world.rank),
        dp_size=world.dims.dp,
        with_positions=needs_positions(run.args),
        group=world.step_group,
        is_recorder=world.dims.counts_tokens(world.rank),
        settings=config.extra_sections,
    )
    batches = builder.train_batches(
        config.training,
        seed=run.seed,
        global_batch_size=run.geometry.global_batch_size,
        replica_group=config.fault_tolerance.share,
    )
    validation_sets = builder.validation_sets(config.validation)
    batches.check_ranks(world.step_group.gather_objects, validation_sets)
    run.origin.warn_of_another_model(batches.fingerprint["tokenizer"])
    stored = run.origin.stored("data")
    if stored and "dataloader" not in config.checkpoint.exclude_from_loading:
        batches.check_state(stored)
    batches.is_interrupted = run.requests.has_stop
    for validation_set in validation_sets.values():
        validation_set.is_interrupted = run.requests.has_stop
    bytes_of_token = torch.tensor(tokenizer.num_bytes())
    if config.loss.name != "cross_entropy":  # bits per byte are of a cross-entropy
        bytes_of_token.zero_()
    return DataParts(batches, validation_sets, bytes_of_token)


# ---- model and optimizer


def model_sections(run: Run) -> Sections:
    """Return the sections that determine how the model is parallelized."""
    config = run.config
    return Sections(
        config.training,
        config.parallelism,
        config.activation_checkpoint,
        config.compile,
        config.model.converters,
        config.quantize.linear.float8,
        config.model.print_after_conversion,
        config.extra_sections,
        run.stage_plan,
    )


def build_model(run: RankRun, data: DataParts) -> ShardedModel:
    """Build this rank's model parts, and draw their weights unless a checkpoint has all of them.

    Raises ConfigError if the selected attention backend cannot compute this model.
    """
    config = run.config
    run.clock.begin_next()
    name = f"{config.model.name} {config.model.flavor}"
    logger.info(f"Building {name} with {run.args}")
    logger.info(f"Model {name} size: {describe_size(run.spec, run.args)}")
    with_tokens = bool(data.batches.sources or data.validation_sets)
    model = build_sharded_model(run, run.world, with_tokens=with_tokens)
    for line in model.lines:
        logger.log(WARNING if line.startswith(HARDLY_FASTER) else INFO, line)
    log_attention(run, run.world.device)
    run.clock.begin_next()
    if run.origin.initializes:
        for part in model.parts:
            initialize(part, run.spec.init_table(run.args), run.seed, run.spec.scale)
    return model


def log_initial_weights(run: RankRun, parts: nn.ModuleList) -> None:
    """Log a hash of the weights that is equal on every topology. A collective."""
    hashes = run.world.step_group.gather_objects(sum(map(weight_hash, parts)))
    start = run.origin.start
    source = f"{start.path} (upcycled) and " if start.upcycles else ""
    logger.info(
        f"Initial weights from {source}seed {run.seed}, hash {sum(hashes) % 2**64:016x} "
        "on any topology"
    )


def build_sharded_model(run: Run, world: World, *, with_tokens: bool) -> ShardedModel:
    """Build this rank's model parts, sharded over the mesh, with uninitialized memory.

    with_tokens: see `chunked_cross_entropy`.
    """
    config, spec, sections = run.config, run.spec, model_sections(run)
    shards = None
    if world.dims.tp > 1:
        shards = VocabShards(world.group("tp"), spec.constraints(run.args)["vocab_size"])
    head_loss = chunked_cross_entropy(
        config.loss.chunk_mib,
        compile_backend=sections.loss_backend,
        shards=shards,
        gathers_logits=config.parallelism.disable_loss_parallel,
        with_tokens=with_tokens,
        token_loss=_token_loss(config.loss.name, config.extra_sections),
    )
    training, num_samples = config.training, run.geometry.samples_per_rank
    kernels.select_backend(training.attention_backend)
    select_product(training.grouped_mm)
    args = fit_positions(run.args, run.max_seq_len)
    with world.allocating():
        exchange = RowExchange(
            run.dims.ep > 1 and config.bounds_rows(is_on_cpu=world.device.type == "cpu"),
            config.parallelism.expert_parallel_capacity,
            world.device,
        )
    built = build_parts(
        spec, args, world, sections, exchange, loss=head_loss, num_samples=num_samples
    )
    dtype = DTYPES[training.mixed_precision_param]
    if config.debug.moe_force_load_balance:
        force_round_robin_routing(built.parts)
    lines = [*built.lines, *describe_experts(built.parts, dtype)]
    return built._replace(lines=lines)


def log_attention(run: Run, device: torch.device) -> None:
    """Log what computes the attention of the model and why, and warn if that is slow on a GPU.

    Raises ConfigError if the selected backend cannot.
    """
    args, training = run.args, run.config.training
    attn_type = getattr(args, "attn_type", "")
    if not attn_type:
        return
    dtype, is_cpu = training.mixed_precision_param, device.type == "cpu"
    reasons = [f'attn_type = "{attn_type}"', dtype, f"heads of {args.head_dim}"]
    if attn_type == "sdpa" or is_cpu:
        choices = _attention_choices(run, device)
        used = {choice.backend for choice in choices.values()}
        text = ", ".join(f"{choice} where it is {mask}" for mask, choice in choices.items())
        text = f"scaled_dot_product_attention by {text}"
        reasons.append(f'training.attention_backend = "{training.attention_backend}"')
    else:
        used, text = {attn_type}, attn_type
    if device.type == "cuda":
        reasons.append("compute capability {}.{}".format(*torch.cuda.get_device_capability(device)))
    logger.info(f"Attention: {text} ({', '.join(reasons)})")
    # No warning of a kernel that the user has chosen.
    for kernel in () if is_cpu else sorted(used - {training.attention_backend}):
        if reason := slow_attention(kernel, dtype=dtype, head_dim=args.head_dim):
            logger.warning(f"Attention is slow: {reason}")
            break


def _attention_choices(run: Run, device: torch.device) -> dict[str, kernels.Choice]:
    """Return the backends of attention that is "causal" only, and of attention that is "masked"."""
    args, config = run.args, run.config
    heads = (args.n_heads, getattr(args, "n_kv_heads", None) or args.n_heads)
    dtype = DTYPES[config.training.mixed_precision_param]
    limit = getattr(args, "sliding_window_size", 0) or getattr(args, "chunk_size", 0)
    sizes = (heads, run.max_seq_len, args.head_dim, dtype, device)
    choices = {}
    if not has_documents(args):
        section = config.parallelism
        is_ulysses = section.context_parallel_rotate_method == "ulysses"
        has_all_queries = section.context_parallel_degree == 1 or is_ulysses
        choices["causal"] = kernels.choose_backend(*sizes, has_all_queries=has_all_queries)
    if has_documents(args) or 0 < limit < run.max_seq_len:
        choices["masked"] = kernels.choose_backend(*sizes, is_masked=True)
    if not all(choice.backend for choice in choices.values()):
        expected = f"a backend for heads of {args.head_dim} elements in {dtype} on {device.type}"
        key, remedy = "training.attention_backend", 'set it to "auto"'
        raise ConfigError([Problem(key, config.training.attention_backend, expected, remedy)])
    return choices


def _token_loss(name: str, settings: Settings) -> TokenLoss | None:
    """Return the user's loss of that name; None for cross-entropy.

    It raises ExtensionError unless it returns one loss per token.
    """
    if not is_dotted(name):
        return None
    function = resolve_name(name, "loss")

    def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = function(logits, labels, settings)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != (len(labels),):
            raise ExtensionError(
                f"the loss {name} returns {shape} for logits {tuple(logits.shape)}. Expected the "
                f"loss of each token, ({len(labels)},): do not reduce it"
            )
        return losses

    return token_loss


def build_optimization(run: Run, parts: nn.ModuleList, world: World, seed: int) -> Optimization:
    """Build the optimizer over all parameters of this rank's parts, and what belongs to it.

    A collective with pipeline parallelism.
    """
    config = run.config
    settings = config.extra_sections
    schedule = build_schedule(config.lr_scheduler, config.training.steps, settings)
    named = [named for part in parts for named in part.named_parameters()]
    context = OptimizerContext(
        run.spec.sharding,
        partial(MatrixOwners, group=world.all_ranks),
        local_positions,
        torch.device("cpu") if config.training.enable_cpu_offload else world.device,
        seed,
        settings,
        run.spec.scale,
    )
    optimizer = build_optimizer(named, config.optimizer, context, world.all_ranks)
    ema = AveragedWeights(optimizer.named, config.ema) if config.ema.enable else None
    sequence_parallel = config.parallelism.enable_sequence_parallel
    balancer = ExpertBalancer(parts, world, sequence_parallel=sequence_parallel)
    after_update = None
    if FLOAT8 in config.model.converters:
        after_update = after_optimizer_step(parts, config.quantize.linear.float8)
    return Optimization(
        optimizer, schedule, ema, balancer if balancer.layers else None, after_update
    )


def build_update_gate(
    section: Resilience, optim: Optimization, progress: Progress, numbers: dict[str, Any]
) -> UpdateGate[Progress]:
    """Build the gate of updates after `progress`. With CPU offload it is on the host.

    numbers: its state in a checkpoint; {} if there is none.
    """
    holds_norms = holds_high_norms(
        section,
        has_experts=optim.balancer is not None,
        is_atomic=optim.optimizer.is_atomic,
    )
    device = optim.optimizer.parameters[0].device
    return UpdateGate(section, device, progress, numbers, holds_norms=holds_norms)


# ---- metrics


def build_metrics(run: RankRun, *, sources: Sequence[str], expert_layers: list[int]) -> Metrics:
    """Build the metrics of a run, and log the peak FLOP/s of the hardware. A collective.

    sources: names of the data. expert_layers: numbers of this rank's layers with experts.
    Raises the errors of observers on all ranks.
    """
    config, section, world, attempt = run.config, run.config.metrics, run.world, run.attempt
    failures = attempt.failures
    observers = Observers()
    if section.observers:
        world.step_group.run_on_leader(
            lambda: observers.build(section.observers, attempt.run, config.extra_sections)
        )
    memory = build_memory_monitor(world.device)
    flops_per_token = run.flops_per_token
    peak = log_hardware(memory, world.device.type, section.peak_flops, flops_per_token)
    num_passes = 4 if config.activation_checkpoint.mode == "full" else 3
    throughput = ThroughputClock(
        TokenFlops(flops_per_token, peak, num_passes),
        num_devices=world.size,
        data_loading_alarm=section.data_loading_alarm,
    )
    metrics = Metrics(
        RowCollector(world.gather_losses, sources),
        throughput,
        memory,
        build_sinks(section, attempt.run, world.rank, failures, mask_values(run.tables)),
        RowFiles(attempt.run, attempt.number, failures) if world.rank == 0 else None,
        observers,
        ExpertMetrics(expert_layers, world.dims.ep),
        build_reference(config.validation) if world.rank == 0 else None,
        log_freq=section.log_freq,
        last_step=config.training.steps,
    )
    if world.rank == 0:
        settings = settings_of(run.tables, world.size)
        measures_memory = world.device.type == "cuda"
        observe = observe_plan(
            attempt, config.job.config_file, settings, measures_memory=measures_memory
        )
        if observe is not None:
            metrics.observers.append(observe)
    return metrics
