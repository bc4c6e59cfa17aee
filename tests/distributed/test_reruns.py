"""A step with a high gradient norm runs again, and the run ends as if it had run once."""

import pytest

from tests.distributed import test_moe
from tests.distributed.parity import build, options, release
from tests.distributed.test_replica_decisions import LAYOUTS, local, merge_hashes, shard_hashes
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

STEPS, CHECKPOINT_FREQ = 9, 4
SETTINGS = {
    "resilience.on_high_norm": "rerun",
    "resilience.first_high_norm": 100,
    "training.steps": STEPS,
    "metrics.log_freq": 3,
    "checkpoint.enable": "true",
    "checkpoint.interval": CHECKPOINT_FREQ,
    "checkpoint.last_save_model_only": "false",
    "checkpoint.keep_latest_k": 0,
    "activation_checkpoint.mode": "none",
}
REGULAR = ("experts",)
EVERY_LAYOUT = [
    pytest.param(name, marks=[] if name in REGULAR else pytest.mark.nightly)
    for name in (*LAYOUTS, "experts")
]


def train(argv, garbage):
    """Train; multiply a gradient of the last rank in the first `garbage[step]` runs of a step.

    Returns the exit code, the progress, the rows and the hashes of the weights.
    """
    trainer = build(argv)
    parameter = next(p for name, p in trainer.optim.optimizer.named if "norm" in name)
    clip, left, rows = trainer.optim.optimizer.clip_gradients, dict(garbage), []

    def corrupt_and_clip(max_norm):
        step = trainer.progress.step + 1
        if left.get(step, 0):
            left[step] -= 1
            if trainer.world.rank == trainer.world.size - 1:
                local(parameter.grad).view(-1)[0] = 1e5
        return clip(max_norm)

    trainer.optim.optimizer.clip_gradients = corrupt_and_clip
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    hashes = shard_hashes(trainer)
    release(trainer)
    timeless = [
        {key: row[key] for key in row if key not in ("time", "data_loading_s")} for row in rows
    ]
    return code, trainer.progress, timeless, hashes


def run(folder, layout, garbage, changes=None):
    """Return the ranks' results, and the events of runs of a step."""
    if layout == "experts":  # no need to ask for it
        num_ranks, settings = test_moe.LAYOUTS["ep"]
        settings = {**settings, **SETTINGS, "resilience.on_high_norm": "auto", **(changes or {})}
        argv = test_moe.settings(folder, 2, **settings, **{"training.local_batch_size": 4})
    else:
        num_ranks, data_ranks, settings = LAYOUTS[layout]
        settings = {**settings, **SETTINGS, "training.local_batch_size": 8 // data_ranks}
        argv = options(str(folder), "float32", **settings)
    endings = run_ranks(train, num_ranks, argv, garbage)
    assert {code for code, *_ in endings} == {ExitCode.DONE}
    events = [row for row in read_rows(folder / "events.jsonl") if row["event"] == "rerun"]
    return endings, [(row["step"], row["outcome"]) for row in events]


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_garbage_changes_nothing(tmp_path, layout):
    """Updates are held in steps 1 to 3 (3 is logged), 4 to 6 (4 is saved), 8 and 9, 9 (the last)."""
    expected, _ = run(tmp_path / "undisturbed", layout, {})
    actual, events = run(tmp_path / "run", layout, {1: 1, 4: 1, 8: 1, 9: 2})
    assert events == [(step, "wrong") for step in (1, 4, 8, 9)]
    for (_, progress, rows, hashes), (_, others, other_rows, other_hashes) in zip(
        expected, actual, strict=True
    ):
        assert (progress, hashes) == (others, other_hashes)
        volatile = ("tps", "tflops", "step_s", "memory_gib", "mfu", "hfu")
        volatile += ("mean_data_loading_s", "data_loading_percent")
        for row, other in zip(rows, other_rows, strict=True):
            for key in row.keys() - set(volatile):
                assert row[key] == other[key], (row["step"], key)
    merge_hashes([hashes for *_, hashes in actual])
    steps = [step.step for step in published_steps(tmp_path / "run/checkpoint")]
    assert steps == [4, 8, STEPS]


OVERFLOWING = {
    "parallelism.expert_parallel_exchange": "bounded",
    "parallelism.expert_parallel_capacity": 1,
    "model.args.load_balance": "bias",  # whose changes a held step must not make
}


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param("false", id="eager"),
        pytest.param("true", id="compiled", marks=pytest.mark.nightly),
    ],
)
def test_steps_whose_rows_do_not_fit_leave_no_trace(tmp_path, compiled):
    """Buffers of an even share are too small for each step, until two overflows enlarge them."""
    bounded = {**OVERFLOWING, "compile.enable": compiled, "compile.backend": "aot_eager"}
    exact = {**bounded, "parallelism.expert_parallel_exchange": "exact"}
    expected, events = run(tmp_path / "exact", "experts", {}, exact)
    assert events == []
    actual, events = run(tmp_path / "bounded", "experts", {}, bounded)
    assert events[:2] == [(1, "overflow"), (2, "overflow")] and len(events) < STEPS
    for (_, progress, rows, hashes), (_, others, other_rows, other_hashes) in zip(
        expected, actual, strict=True
    ):
        assert (progress, hashes) == (others, other_hashes)
        for row, other in zip(rows, other_rows, strict=True):
            assert [row[key] for key in KEPT] == [other[key] for key in KEPT]


KEPT = ("step", "loss", "grad_norm", "skipped", "data_digest_chain", "n_tokens_seen")


def test_a_second_high_norm_is_accepted(tmp_path):
    endings, events = run(tmp_path / "run", "fsdp2", {5: 2})
    assert events == [(5, "spike")]
    _, progress, rows, _ = endings[0]
    assert progress.step == STEPS and [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["skipped"] for row in rows] == [0] * STEPS and rows[4]["grad_norm"] > 1e4


def test_a_run_that_stops_before_the_second_run_repeats_the_step(tmp_path):
    """The kill switch is seen while updates are held. The next start begins with the held step."""
    folder = tmp_path / "run"
    kept, _ = run(tmp_path / "undisturbed", "fsdp2", {})
    argv = options(str(folder), "float32", **SETTINGS, **{"training.local_batch_size": 4})
    endings = run_ranks(train_until_killed, 2, argv, 5, folder / "KILL")
    assert endings == [(ExitCode.INTERRUPTED, 4)] * 2
    (folder / "KILL").unlink()
    resumed, events = run(folder, "fsdp2", {})
    assert events == []
    assert [hashes for *_, hashes in resumed] == [hashes for *_, hashes in kept]


def train_until_killed(argv, step, switch):
    """Train with garbage in `step`, during which the kill switch appears. Return code and step."""
    trainer = build(argv)
    clip = trainer.optim.optimizer.clip_gradients
    parameter = trainer.optim.optimizer.parameters[0]

    def corrupt_and_clip(max_norm):
        if trainer.progress.step + 1 == step:
            local(parameter.grad).view(-1)[0] = 1e5
            switch.touch()
        return clip(max_norm)

    trainer.optim.optimizer.clip_gradients = corrupt_and_clip
    code = trainer.train()
    release(trainer)
    return code, trainer.progress.step
