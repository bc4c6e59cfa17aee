"""The dry run allocates, computes and sends exactly what the trainer does on real CPU ranks."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed import parity
from tests.harness.rank_pool import run_ranks
from torchtitan_like import guard, train
from torchtitan_like.check import load_checked
from torchtitan_like.distributed.stages import plan_stages
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan.dry_run import record_ranks
from torchtitan_like.plan.fake import _split_evenly
from torchtitan_like.plan.ledger import find_peak
from torchtitan_like.plan.record import Alloc, Recorder, Recording, recording_in_place
from torchtitan_like.util.plan_file import ModuleBytes

NUM_STEPS = 2
FSDP = "parallelism.data_parallel_shard_degree"
REPLICAS = "parallelism.data_parallel_replicate_degree"
TP = "parallelism.tensor_parallel_degree"
CP = "parallelism.context_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"


class Measured(NamedTuple):
    """What is equal on a rank and in its dry run.

    live: bytes at the end of each phase. sent: (operator, bytes, ranks) of each collective.
    peak: most bytes at once; a rank may measure a tensor of its last collective more.
    modules: bytes that each module keeps between steps.
    """

    live: dict[str, int]
    sent: Counter[tuple[str, int, int]]
    flops: int
    peak: int
    modules: ModuleBytes


def live_bytes(recording: Recording) -> dict[str, int]:
    """Return the bytes of the device that are alive at each mark."""
    ends = {mark.num_events: mark.name for mark in recording.marks}
    sizes: dict[int, int] = {}
    at_marks: dict[str, int] = {}
    for index, event in enumerate(recording.events):
        if index in ends:
            at_marks[ends[index]] = sum(sizes.values())
        if not isinstance(event, Alloc):
            sizes.pop(event.id, 0)
        elif not event.is_host:
            sizes[event.id] = event.num_bytes
    last = sum(sizes.values())
    return at_marks | {mark.name: last for mark in recording.marks if mark.name not in at_marks}


def measure(recording: Recording, modules: ModuleBytes) -> Measured:
    work = recording.between("optimizer", f"step {NUM_STEPS}")
    peak = find_peak(recording)
    assert peak is not None
    return Measured(
        live_bytes(recording),
        Counter(
            (item.op, item.num_bytes, item.group.size)
            for item in work
            if item.kind == "collective" and item.group is not None
        ),
        sum(item.flops for item in work),
        peak.num_bytes,
        modules,
    )


def wait_for_threads() -> None:
    """Wait until all other threads of this process sleep.

    A thread of gloo holds the tensors of a collective for a moment after its end. Each pause gives
    up the interpreter's lock, which such a thread needs to free a tensor.
    """
    own, num_calm = str(threading.get_native_id()), 0
    while num_calm < 3:
        time.sleep(0.01)
        tasks = Path("/proc/self/task").iterdir()
        is_calm = all(is_asleep(task) for task in tasks if task.name != own)
        num_calm = num_calm + 1 if is_calm else 0


def is_asleep(task: Path) -> bool:
    """Return whether a thread, a folder in /proc, sleeps or has ended."""
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "S"


def record_trainer(argv: list[str]) -> Measured:
    """Build the trainer of this rank and run its steps on real tensors."""
    recorder = Recorder("cpu")

    @contextmanager
    def recording(mark: str = "") -> Iterator[None]:
        with recorder, recording_in_place(recorder):
            yield
        if mark:
            wait_for_threads()
            recorder.recording.mark(mark)

    module_of = {"build_model": train, "build_optimization": train, "build_update_gate": guard}
    originals = {name: getattr(module, name) for name, module in module_of.items()}
    marks = {"build_model": "model"}
    try:
        for name, original in originals.items():

            def build(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                with recording(marks.get(name, "")):
                    return original(*args, **kwargs)

            setattr(module_of[name], name, build)
        trainer = parity.build(argv)
        trainer.guard.update_gate.start_holding()  # as in `Trainer.train`
    finally:
        for name, original in originals.items():
            setattr(module_of[name], name, original)
    wait_for_threads()
    recorder.recording.mark("optimizer")
    try:
        for step in range(1, NUM_STEPS + 1):
            fetched = trainer.fetch(step)
            agreement = fetched.agreement.wait()
            with recording():
                trainer.train_step(step, fetched, agreement)
                gc.collect()  # as the dry run does
                wait_for_threads()
            recorder.recording.mark(f"step {step}")
        modules = trainer.optim.kept_bytes()
    finally:
        parity.release(trainer)
    return measure(recorder.recording, modules)


ALWAYS = "parallelism.fsdp_reshard_after_forward"
AC = "activation_checkpoint.mode"
AC_OP = {AC: "selective", "activation_checkpoint.selective_ac_option": "op"}
ACCUMULATION = {"training.local_batch_size": 2}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
METHOD = "parallelism.context_parallel_rotate_method"
LAYERS = "model.args.n_layers"
EP = "parallelism.expert_parallel_degree"
ETP = "parallelism.expert_tensor_parallel_degree"
EXPERTS: dict[str, object] = {
    "model.name": "qwen3",
    "model.args.multiple_of": None,  # of Llama 3
    "model.flavor": "debugmodel_moe",
    "model.args.head_dim": 8,
    "model.args.num_experts": 8,
    "model.args.top_k": 2,
    "model.args.moe_inter_dim": 16,
    "training.mixed_precision_param": "bfloat16",
}
# The router of these runs chooses experts in turn. So ranks exchange equal numbers of rows, as a dry
# run assumes, and all bytes are equal.
EVEN = EXPERTS | {"debug.moe_force_load_balance": True}
# Name -> (ranks, settings). Those of EVERY_RUN run every time, all others in nightly runs.
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one rank": (1, {}),
    "one rank in bfloat16": (1, {"training.mixed_precision_param": "bfloat16"}),
    "fsdp": (2, ACCUMULATION),
    "tp": (2, {TP: 2, **AC_OP}),
    "pp": (2, {PP: 2}),
    "fsdp, always reshard": (2, {ALWAYS: "always", AC: "full"}),
    "fsdp, never reshard": (2, {ALWAYS: "never", **AC_OP}),
    "fsdp in bfloat16": (2, {"training.mixed_precision_param": "bfloat16"}),
    "ddp": (2, {REPLICAS: 2, FSDP: 1}),
    "hsdp": (4, {REPLICAS: 2, **ACCUMULATION}),
    "tp without sequence parallelism": (2, {TP: 2, "parallelism.enable_sequence_parallel": False}),
    "tp, gathered logits": (2, {TP: 2, "parallelism.disable_loss_parallel": True}),
    "fsdp x tp": (4, {TP: 2, AC: "selective"}),
    "cp": (2, {CP: 2}),
    "cp, ring": (2, {CP: 2, METHOD: "alltoall"}),
    "cp, ulysses": (2, {CP: 2, METHOD: "ulysses"}),
    "cp x tp": (4, {CP: 2, TP: 2}),
    "pp x fsdp": (4, {PP: 2}),
    "pp, interleaved": (2, {PP: 2, SCHEDULE: "Interleaved1F1B", LAYERS: 4}),
    "pp, zero bubble": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", LAYERS: 4}),
    "optimizer in backward": (2, {"optimizer.early_step_in_backward": True}),
    "simple_fsdp": (2, {"parallelism.data_parallel_impl": "simple_fsdp"}),
    "chunked loss": (1, {"loss.chunk_mib": 1}),
    "offloaded activations": (2, {AC: "offload"}),
    "averaged weights": (2, {"ema.enable": True}),
    "averaged weights in bfloat16": (1, {"ema.enable": True, "training.dtype": "bfloat16"}),
    "experts, fsdp": (2, EXPERTS),
    "experts, fsdp x tp": (4, EXPERTS | {TP: 2}),
    "experts, tp x etp": (2, EXPERTS | {TP: 2, ETP: 2}),
    "ep": (2, EVEN | {EP: 2}),
    "ep x fsdp": (4, EVEN | {EP: 2}),
    "ep on tp ranks": (2, EVEN | {EP: 2, TP: 2}),
    "ep in float32": (2, EVEN | {EP: 2, "training.mixed_precision_param": "float32"}),
    "ep, full recomputation": (2, EVEN | {EP: 2, AC: "full", **ACCUMULATION}),
    "ep, per-op recomputation": (2, EVEN | {EP: 2, **AC_OP}),
    "ep x tp": (4, EVEN | {EP: 4, TP: 2}),
    "ep x etp": (4, EVEN | {EP: 2, TP: 2, ETP: 2}),
    "ep x pp": (4, EVEN | {EP: 2, PP: 2}),
    "ep x hsdp": (4, EVEN | {EP: 2, REPLICAS: 2}),
    "ep x cp": (2, EVEN | {EP: 2, CP: 2}),
}
EVERY_RUN = ("one rank", "ep")


def cells() -> list[Any]:
    marks = {name: () if name in EVERY_RUN else (pytest.mark.nightly,) for name in LAYOUTS}
    return [pytest.param(name, marks=marks[name]) for name in LAYOUTS]


@pytest.mark.parametrize("layout", cells())
def test_dry_run_equals_real_ranks(layout: str, tmp_path: Path) -> None:
    num_ranks, settings = LAYOUTS[layout]
    data_ranks = num_ranks // math.prod(int(settings.get(key, 1)) for key in (TP, CP, PP))
    sizes = {"training.local_batch_size": 8 // data_ranks}
    argv = parity.options(str(tmp_path / "run"), "float32", **sizes | settings)
    real = run_ranks(record_trainer, num_ranks, argv)
    config, _ = load_checked(argv, num_ranks, training=False)
    dry = record_ranks(config, num_ranks, range(num_ranks), device_type="cpu", num_steps=NUM_STEPS)
    for rank in range(num_ranks):
        planned = measure(dry[rank].recording, dry[rank].modules)
        assert planned == real[rank]._replace(peak=planned.peak), rank
        # At the peak a thread of gloo may still hold a tensor of the last collective.
        largest = max((num_bytes for _, num_bytes, _ in planned.sent), default=0)
        assert 0 <= real[rank].peak - planned.peak <= largest, rank


@pytest.mark.nightly
@pytest.mark.parametrize(
    "schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_recorded_actions_are_those_of_the_schedule(schedule: str, tmp_path: Path) -> None:
    settings = {PP: 2, SCHEDULE: schedule, LAYERS: 4, "training.local_batch_size": 4}
    argv = parity.options(str(tmp_path / "run"), "float32", **settings)
    config, _ = load_checked(argv, 2, training=False)
    dry = record_ranks(config, 2, range(2), num_steps=1)
    spec = get_spec(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    number = 1 + max(span.action.micro_batch for span in dry[0].recording.actions)
    order = plan_stages(spec, args, config.parallelism).order(number)
    for rank in range(2):
        recording = dry[rank].recording
        assert [span.action for span in recording.actions] == order[rank]
        ends = [end for span in recording.actions for end in (span.start, span.end)]
        assert ends == sorted(ends)


@pytest.mark.parametrize(("exchange", "padding"), [("exact", 1.0), ("bounded", 1.5)])
def test_exchanges_of_experts_are_even_and_belong_to_their_group(
    tmp_path: Path, exchange: str, padding: float
) -> None:
    """The groups of tensor and of expert parallelism have the same ranks here."""
    settings = EXPERTS | {TP: 2, EP: 2, LAYERS: 1, "parallelism.expert_parallel_exchange": exchange}
    argv = parity.options(str(tmp_path / "run"), "float32", **settings)
    config, _ = load_checked(argv, 2, training=False)
    recording = record_ranks(config, 2, [0], num_steps=1)[0].recording
    sent = Counter(
        (item.num_bytes, item.dtype)
        for item in recording.work
        if item.group is not None and item.group.dimension == "ep"
    )
    rows = (
        padding * 8 * 32 // 2 * 2
    )  # samples, tokens; half of them on this rank, two experts for each
    # Counts of 8 experts in int64. Rows of 32 numbers: there and back, forward and backward.
    assert sent == {(8 * 8, "int64"): 1, (rows * 32 * 2, "bfloat16"): 4}
    assert any(item.group is not None and item.group.dimension == "tp" for item in recording.work)
    copies = [item.kind for item in recording.work if item.op == "copy_to_host"]
    assert copies == (["copy"] if exchange == "exact" else [])


@pytest.mark.parametrize(
    ("names", "op", "is_functional", "expected"),
    [
        (("tp", "ep"), "all_to_all_single", True, "ep"),
        (("tp", "ep"), "all_gather_into_tensor", True, "tp"),
        (("tp", "efsdp"), "all_gather_into_tensor", True, "tp"),
        (("tp", "efsdp"), "_allgather_base_", False, "efsdp"),
        (("dp_shard", "ep"), "_allgather_base_", False, "dp_shard"),
        (("ep",), "all_to_all_single", True, "ep"),
        ((), "allreduce_", False, ""),
    ],
)
def test_collectives_of_a_shared_group_belong_to_one_dimension(
    names: tuple[str, ...], op: str, is_functional: bool, expected: str
) -> None:
    recorder = Recorder("cpu")
    group: Any = SimpleNamespace(group_name="0")
    recorder.name_dimensions(dict.fromkeys(names, group))
    assert recorder._dimension("0", op, is_functional) == expected


def test_rows_that_ranks_do_not_divide_are_nearly_even() -> None:
    assert _split_evenly(torch.zeros(2, 4, dtype=torch.int64), 10) == [[3, 3, 2, 2]] * 2
