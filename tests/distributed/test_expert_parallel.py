"""Expert parallelism: uneven loads, messages, and checkpoints and exports on other layouts."""

import logging
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import build, options, release
from tests.distributed.test_matrix import REPLICATE, TP, pipeline
from tests.distributed.test_moe import EP, ETP, MODEL
from tests.distributed.test_run import run_one_rank
from tests.distributed.test_saving import EXACT, SAVING, metric_rows, train
from tests.distributed.traffic import Traffic
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.distributed.row_exchange import (
    RowExchange,
    exchange_with_owners,
    note_excess,
)
from torchtitan_like.distributed.views import on_local_parameters
from torchtitan_like.models.layers.moe import Experts
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

EXPERTS, DIM, HIDDEN = 4, 8, 12
HALF = {"training.local_batch_size": 4}  # of the batch, on each of two ranks


# ---- loads

# Each case: the expert ids of every token, on each of two ranks. Rank 0 has experts 0 and 1.
LOADS = {
    "even": ([[0, 2], [1, 3]], [[3, 1], [2, 0]]),
    "all to one expert": ([[3], [3], [3]], [[3], [3]]),
    "nothing for rank 1": ([[0, 1], [1, 0]], [[0, 1]]),
    "one token": ([[2]], [[1]]),
    "a rank without tokens": ([[0, 3], [2, 1]], []),
    "all experts": ([[0, 1, 2, 3], [3, 1, 0, 2]], [[2, 3, 0, 1]]),
}


def stacked_experts(first, last):
    generator = torch.Generator().manual_seed(1)
    experts = Experts(EXPERTS, DIM, HIDDEN).double()
    for name, parameter in list(experts.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        setattr(experts, name, torch.nn.Parameter(values[first:last]))
    return experts


def inputs(ids_of_ranks):
    """Return (tokens, weights, expert ids) of each rank."""
    generator = torch.Generator().manual_seed(2)
    top_k = max(len(choice) for ids in ids_of_ranks for choice in ids)
    return [
        (
            torch.randn(len(ids), DIM, generator=generator, dtype=torch.float64),
            torch.rand(len(ids), top_k, generator=generator, dtype=torch.float64),
            torch.tensor(ids, dtype=torch.int64).view(len(ids), top_k),
        )
        for ids in ids_of_ranks
    ]


def results(experts, forward, tokens, weights, ids):
    """Return the output and the gradients of tokens, weights, w1, w2 and w3."""
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    out = forward(tokens, weights, ids)
    scale = torch.arange(1, out.numel() + 1, dtype=out.dtype).view_as(out)
    (out * scale).sum().backward()
    return [out.detach(), tokens.grad, weights.grad, *(p.grad for p in experts.parameters())]


# The same number of tokens on both ranks, and by how much a buffer of 1.25 even shares (5 of 8 rows)
# is too small.
EQUAL_LOADS = {
    "even": (LOADS["even"], 0.0),
    "fits": (([[0, 1], [1, 2], [0, 1], [2, 3]], [[3, 2], [0, 1], [2, 0], [1, 3]]), 0.0),
    "one row too many": (
        ([[0, 1], [1, 0], [0, 1], [2, 3]], [[3, 2], [0, 1], [2, 0], [1, 3]]),
        0.25,
    ),
    "all to one rank": (([[2, 3]] * 4, [[3, 2]] * 4), 0.75),
    "all to one expert": (([[3], [3], [3], [3]], [[3], [3], [3], [3]]), 1.0),  # 2 of 4 rows fit
}


def results_on_rank(loads, is_compiled, capacity=None):
    """Return the results for each load, with the experts of this rank, and the overflow of each.

    capacity: of a bounded exchange; None: it is exact.
    """
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = is_compiled
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(capacity is not None)
    rank, per_rank = dist.get_rank(), EXPERTS // 2
    experts = stacked_experts(rank * per_rank, (rank + 1) * per_rank)
    exchange = RowExchange(capacity is not None, capacity or 1.0, torch.device("cpu"))
    exchange_with_owners(experts, dist.group.WORLD, exchange)
    exchange.connect(experts)
    exchange.start_bounding()
    forward = partial(compute, experts)
    if is_compiled:
        forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
    forward = on_local_parameters(experts, forward)
    found = []
    for load in loads:
        found.append(results(experts, forward, *inputs(load)[rank]))
        found[-1].append(exchange.take_overflow(dist.group.WORLD))
    return found


def compute(experts, tokens, weights, ids):
    routes = experts.find_routes(ids, weights)
    return experts(experts.send(tokens, routes), routes)


@pytest.mark.parametrize(
    "is_compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.nightly)],
)
def test_any_load_equals_one_rank(is_compiled):
    """One compiled function computes all loads."""
    by_rank = run_ranks(results_on_rank, 2, list(LOADS.values()), is_compiled)
    for number, (name, load) in enumerate(LOADS.items()):
        assert_equal_to_one_rank([results[number] for results in by_rank], load, name)


@pytest.mark.parametrize("capacity", [1.25, 2.0])
@pytest.mark.parametrize(
    "is_compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.nightly)],
)
def test_a_bounded_exchange_is_exact_or_says_what_is_missing(is_compiled, capacity):
    """Memory that is not written holds NaN: padding must not reach any result."""
    loads = [load for load, _ in EQUAL_LOADS.values()]
    by_rank = run_ranks(results_on_rank, 2, loads, is_compiled, capacity)
    for number, (name, (load, excess)) in enumerate(EQUAL_LOADS.items()):
        by_load = [results[number] for results in by_rank]
        missing = excess if capacity < 2 else 0.0
        assert [results.pop() for results in by_load] == [missing] * 2, name
        if not missing:
            assert_equal_to_one_rank(by_load, load, name)


def test_what_cannot_run_again_is_exact():
    exchange = RowExchange(True, 1.5, torch.device("cpu"))
    assert exchange.buffer_size(8, 2) == 0  # a loop that repeats no step
    exchange.start_bounding()
    assert exchange.buffer_size(8, 2) == 6
    with torch.no_grad():
        assert exchange.buffer_size(8, 2) == 0
    exchange.run_next_exactly()
    assert exchange.buffer_size(8, 2) == 0
    exchange.take_overflow(None)
    assert exchange.buffer_size(8, 2) == 6


def test_the_exchange_of_a_frozen_router_is_exact():
    """It has no backward that could record an overflow."""
    run_ranks(overflow_of_frozen_router, 2)


def overflow_of_frozen_router():
    rank, per_rank = dist.get_rank(), EXPERTS // 2
    experts = stacked_experts(rank * per_rank, (rank + 1) * per_rank)
    exchange = RowExchange(True, 1.0, torch.device("cpu"))
    exchange_with_owners(experts, dist.group.WORLD, exchange)
    exchange.connect(experts)
    exchange.start_bounding()
    load, _ = EQUAL_LOADS["all to one rank"]
    tokens, weights, ids = inputs(load)[rank]
    for values, is_exact in ((weights.requires_grad_(), False), (weights.detach(), True)):
        assert (experts.find_routes(ids, values).buffer_size == 0) == is_exact


def assert_equal_to_one_rank(by_rank, load, name):
    experts = stacked_experts(0, EXPERTS)
    expected = [results(experts, partial(compute, experts), *each) for each in inputs(load)]
    for rank in range(2):
        for actual, value in zip(by_rank[rank][:3], expected[rank][:3], strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-12, msg=name)
    for index in (3, 4, 5):  # the experts' gradients are sums over the tokens of both ranks
        actual = torch.cat([by_rank[rank][index] for rank in range(2)])
        total = expected[0][index] + expected[1][index]
        torch.testing.assert_close(actual, total, rtol=1e-12, atol=1e-12, msg=name)


class Noting(torch.nn.Module):
    """A module whose backward notes an excess."""

    changed_in_backward = ("excess",)

    def __init__(self):
        super().__init__()
        self.register_buffer("excess", torch.zeros(()))

    def forward(self, x, rows):
        return note_excess(x.sin(), (rows * 3).exp().max(), self.excess)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_an_excess_outlives_other_micro_batches_in_flight(is_compiled):
    """Pipelines run the forward of a second micro-batch before the backward of the first one."""
    module = Noting()
    forward = module.forward
    if is_compiled:
        forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
    forward = on_local_parameters(module, forward)
    x = torch.ones(8, requires_grad=True)
    outputs = [forward(x, torch.full((100,), value)) for value in (1.0, 0.0)]
    for output in outputs:
        output.sum().backward()
    torch.testing.assert_close(module.excess, torch.tensor(3.0).exp())


# ---- what is sent

RECOMPUTED = {
    # activation_checkpoint.* -> rows sent in a layer; the numbers of rows are sent once in each case
    "none": ({"mode": "none"}, 4),
    "full": ({"mode": "full"}, 6),
    "per op": ({"mode": "selective", "selective_ac_option": "op"}, 4),
}


def exchanges_of_step(argv):
    """Return (all-to-alls of integers, of numbers, copies to the host) of the second step."""
    trainer = build(argv)
    trainer.model.exchange.start_bounding()
    for step in (1, 2):
        fetched = trainer.fetch(step)
        with Traffic() as traffic:
            trainer.train_step(step, fetched, fetched.agreement.wait())
    release(trainer)
    sent = [each for each in traffic.sent if each.kind == "all_to_all"]
    integers = sum(not each.dtype.is_floating_point for each in sent)
    return integers, len(sent) - integers, traffic.num_row_counts


@pytest.mark.parametrize("exchange", ["exact", "bounded"])
@pytest.mark.parametrize("mode", RECOMPUTED)
def test_recomputation_does_not_count_rows_again(tmp_path, mode, exchange):
    """The bounded exchange never copies the numbers of rows to the host."""
    section, num_rows = RECOMPUTED[mode]
    changes = {"training.local_batch_size": 4, "parallelism.expert_parallel_exchange": exchange}
    changes |= {f"activation_checkpoint.{key}": value for key, value in section.items()}
    argv = arguments(tmp_path, **{EP: 2, "model.args.n_layers": 3}, **changes)
    layers = 3
    copies = layers if exchange == "exact" else 0
    assert run_ranks(exchanges_of_step, 2, argv) == [(layers, layers * num_rows, copies)] * 2


# ---- log and non-finite scores


def logged_lines(argv):
    lines, handler = [], logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        release(build(argv))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return lines


def test_the_log_names_what_computes_the_experts(tmp_path):
    """All experts of a layer count, including the experts of other ranks."""
    lines = run_ranks(logged_lines, 2, arguments(tmp_path / "run", **{EP: 2, **HALF}))[0]
    assert "Experts: 8 in each layer, computed by grouped_mm in torch.float32" in lines


def train_without_scores(argv, broken_step):
    """Give rank 1's tokens scores that are not numbers in one step.

    Returns the exit code, the skipped steps, and whether all weights are finite.
    """
    trainer = build(argv)
    router = trainer.parts[0].layers["1"].moe.router
    compute_logits, rows = router.logits, []

    def logits(tokens):
        is_broken = trainer.world.rank == 1 and trainer.progress.step + 1 == broken_step
        return compute_logits(tokens) * (torch.nan if is_broken else 1)

    router.logits = logits
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    is_finite = all(local_shard(p).isfinite().all() for _, p in trainer.optim.optimizer.named)
    release(trainer)
    return code, [row["step"] for row in rows if row["skipped"]], is_finite


def local_shard(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def test_a_step_without_scores_is_skipped(tmp_path):
    """Every token still has experts, so that all ranks exchange rows and none waits forever."""
    changes = {EP: 2, **HALF, "training.steps": 4, "resilience.on_nonfinite": "skip"}
    argv = arguments(tmp_path / "run", **changes, **{"model.args.load_balance": "bias"})
    results = run_ranks(train_without_scores, 2, argv, 2, timeout=60)
    assert results == [(ExitCode.DONE, [2], True)] * 2


# ---- memory


def errors_without_memory(argv):
    """Run out of memory in step 2; return the logged errors."""
    errors, handler, train_step = [], logging.Handler(logging.ERROR), Trainer.train_step
    handler.emit = lambda record: errors.append(record.getMessage())

    def fail_in_step_2(trainer, step, *args):
        if step == 2:
            raise MemoryError("no memory left")
        return train_step(trainer, step, *args)

    Trainer.train_step = fail_in_step_2
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(MemoryError):
            run_one_rank(argv)
    finally:
        Trainer.train_step = train_step
        logging.getLogger().removeHandler(handler)
    return errors


def test_an_out_of_memory_error_names_the_fullest_expert(tmp_path):
    (errors,) = run_ranks(errors_without_memory, 1, arguments(tmp_path / "run"))
    assert "activation_checkpoint.mode" in errors[0]
    assert re.search(r"expert \d of layer [01] computed \d\.\d times", errors[1])


# ---- checkpoints and exports


def arguments(folder, **overrides):
    argv = options(str(folder), "float32", **{**MODEL, "model.args.num_experts": 8, **overrides})
    multiple_of = argv.index("--model.args.multiple_of")  # of Llama 3
    return argv[:multiple_of] + argv[multiple_of + 2 :]


def run(folder, *, ranks, **overrides):
    codes = run_ranks(train, ranks, arguments(folder, **{**SAVING, **overrides}), timeout=120)
    assert codes == [ExitCode.DONE] * ranks


CHAIN = [
    (2, {EP: 2}),
    (4, {EP: 2, TP: 2, ETP: 2}),
    (1, {}),
    (4, {EP: 2, **pipeline("1F1B")}),
    (4, {EP: 4}),
    (4, {EP: 2, REPLICATE: 2}),
    (2, {}),
]


BALANCED = {"model.args.load_balance_coeff": 0.01}  # biases change which experts are chosen
METHODS = ["bias", pytest.param("global", marks=pytest.mark.nightly)]


def balancing_state(step_folder):
    """Return the biases or the fractions of the loads in a checkpoint."""
    contents = open_checkpoint(step_folder)
    return {
        name: contents.read(name).tolist()
        for name in contents.stored
        if name.endswith(("expert_bias", "load_fractions"))
    }


@pytest.mark.parametrize(
    ("method", "total"),
    [("bias", 5), pytest.param("global", len(CHAIN), marks=pytest.mark.nightly)],
)
def test_a_run_moves_between_expert_parallel_layouts(tmp_path, method, total):
    changes = {"lr_scheduler.total_steps": total, "training.local_batch_size": 2}
    changes |= {"model.args.load_balance": method, **BALANCED}
    run(tmp_path / "straight", ranks=1, **changes, **{"training.steps": total})
    for step, (ranks, layout) in enumerate(CHAIN[:total], start=1):
        run(tmp_path / "moved", ranks=ranks, **changes, **layout, **{"training.steps": step})
    exact = ("step", "n_tokens_seen", "lr", "data_digest_chain")
    assert metric_rows(tmp_path / "moved", exact) == metric_rows(tmp_path / "straight", exact)
    for key in ("loss", "grad_norm"):
        moved, straight = (
            [float.fromhex(value) for (value,) in metric_rows(tmp_path / name, (key,))]
            for name in ("moved", "straight")
        )
        assert moved == pytest.approx(straight, rel=1e-5)
    violations = [
        [row["moe"]["max_violation_by_layer"] for row in read_rows(folder / "metrics.jsonl")]
        for folder in (tmp_path / "moved", tmp_path / "straight")
    ]
    assert violations[0] == violations[1]
    state = balancing_state(tmp_path / f"moved/checkpoint/step-{total}")
    assert state == balancing_state(tmp_path / f"straight/checkpoint/step-{total}")
    assert len(state) == 2 and all(len(set(values)) > 1 for values in state.values())


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, method):
    layout = {EP: 2, "lr_scheduler.total_steps": 4, "debug.deterministic": "true"}
    layout |= {"model.args.load_balance": method, **BALANCED}
    run(tmp_path / "straight", ranks=2, **layout, **{"training.steps": 4})
    for steps in (2, 4):
        run(tmp_path / "resumed", ranks=2, **layout, **{"training.steps": steps})
    keys = (*EXACT, "moe")
    assert metric_rows(tmp_path / "resumed", keys) == metric_rows(tmp_path / "straight", keys)
    state = balancing_state(tmp_path / "resumed/checkpoint/step-4")
    assert state == balancing_state(tmp_path / "straight/checkpoint/step-4") != {}


EXPORTING = {
    "training.steps": 1,
    "checkpoint.hf_interval": 1,
    "optimizer.lr": 1e-30,  # the weights stay equal on all layouts
}


def exported_files(folder, ranks, layout):
    run(folder, ranks=ranks, **EXPORTING, **layout)
    return {path.name: path.read_bytes() for path in folder.glob("**/step-1/*.safetensors")}


@pytest.fixture(scope="module")
def files_of_one_rank(tmp_path_factory):
    return exported_files(tmp_path_factory.mktemp("export") / "one", 1, {})


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, {EP: 2}, id="ep", marks=pytest.mark.nightly),
        pytest.param(4, {EP: 4, TP: 2}, id="ep-tp", marks=pytest.mark.nightly),
        pytest.param(4, {EP: 2, TP: 2, ETP: 2}, id="ep-etp"),
        pytest.param(4, {EP: 2, **pipeline("1F1B")}, id="ep-pp", marks=pytest.mark.nightly),
    ],
)
def test_every_layout_exports_the_same_bytes(tmp_path, files_of_one_rank, ranks, layout):
    assert exported_files(tmp_path / "many", ranks, layout) == files_of_one_rank != {}
