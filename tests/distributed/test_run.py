"""A run and the files of its run directory: validation, token counts, stops, logs, seeds."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import LR, build, options, release, short_documents
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.data.data_errors import ReadInterrupted
from torchtitan_like.distributed.world import launched_as
from torchtitan_like.resilience.agreement import Request, Requests
from torchtitan_like.resilience.heartbeat import RankPosition
from torchtitan_like.run import main, resolve_run, run_job
from torchtitan_like.train import Trainer
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

TWO_RANKS = {"training.local_batch_size": 4}


def run_one_rank(argv):
    """Run on this rank of a pool."""
    launched = launched_as()
    return run_job(resolve_run(argv, launched.world_size), launched, Requests(), RankPosition())


def test_validation_runs_after_step_1_periodically_and_at_the_end(tmp_path):
    changes = {
        "training.steps": 5,
        "validation.enable": "true",
        "validation.freq": 3,
        "validation.steps": 1,
        "validation.seq_len": 32,
        "validation.dataset": "shakespeare_validation",
    }
    assert run_ranks(run_one_rank, 1, options(str(tmp_path / "run"), "float32", **changes)) == [
        ExitCode.DONE
    ]
    assert [row["step"] for row in read_rows(tmp_path / "run/validation.jsonl")] == [1, 3, 5]


def run_and_collect_errors(argvs):
    """Run on this rank with its own arguments; return the exit code and the logged errors."""
    errors, handler = [], logging.Handler(logging.ERROR)
    handler.emit = errors.append
    logging.getLogger().addHandler(handler)
    try:
        return run_one_rank(argvs[launched_as().rank]), [error.getMessage() for error in errors]
    finally:
        logging.getLogger().removeHandler(handler)


def test_ranks_with_different_degrees_exit_before_creating_groups(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **TWO_RANKS, **{"training.steps": 1})
    other = [*argv, "--parallelism.tensor_parallel_degree", "2"]
    for code, errors in run_ranks(run_and_collect_errors, 2, [argv, other]):
        assert code is ExitCode.BAD_CONFIG
        assert (
            "tensor_parallel_degree = 1: expected the same on every rank; rank 1 has 2"
            in "\n".join(errors)
        )
    end = json.loads((tmp_path / "run/exit.json").read_text())
    assert (end["code"], end["step"]) == (ExitCode.BAD_CONFIG, 0)


def rates_and_norms(argv):
    """Return the learning rates and the gradient norm of each optimizer update."""
    trainer = build(argv)
    updates, step = [], trainer.optim.optimizer.step

    def traced(skip):
        rates = {
            group["lr"]
            for optimizer in trainer.optim.optimizer._optimizers
            for group in optimizer.param_groups
        }
        step(skip)  # divides the gradients
        norms = [p.grad.norm() for p in trainer.optim.optimizer.parameters]
        updates.append((rates, torch.stack(norms).norm().item()))

    trainer.optim.optimizer.step = traced
    trainer.train()
    release(trainer)
    return updates


def test_each_update_uses_its_scheduled_rate_and_clipped_gradients(tmp_path):
    """The schedule has two steps of warm-up, and decays to 0 at step 5. Step 3 is in a resumed run."""
    changes = {
        "lr_scheduler.warmup_steps": 2,
        "lr_scheduler.total_steps": 4,
        "training.max_norm": 0.125,
        "checkpoint.enable": "true",
        "checkpoint.last_save_model_only": "false",
    }
    updates = []
    for steps in (2, 4):
        argv = options(str(tmp_path / "run"), "float32", **changes, **{"training.steps": steps})
        updates += run_ranks(rates_and_norms, 1, argv)[0]
    assert [rates for rates, _ in updates] == [{LR / 2}, {LR}, {LR}, {LR / 2}]
    assert [norm for _, norm in updates] == pytest.approx([0.125] * 4, rel=1e-4)
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["lr"] for row in rows] == [LR / 2, LR, LR, LR / 2] and all(
        row["grad_norm"] > 0.25 for row in rows
    )


def test_padding_of_the_last_batch_is_not_counted(tmp_path):
    """The number of samples of the epoch is no multiple of the batch size."""
    text = tmp_path / "one.jsonl"
    text.write_text("".join(short_documents(tmp_path).read_text().splitlines(keepends=True)[:30]))
    changes = {
        "data.sources.one.path": text,
        "data.sources.one.max_epochs": 1,
        "data.mask_document_starts": "false",
        "training.steps": 100,
    }
    assert run_ranks(run_one_rank, 1, options(str(tmp_path / "run"), "float32", **changes)) == [
        ExitCode.DONE
    ]
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    tokens_seen = [row["n_tokens_seen"] for row in rows]
    assert tokens_seen[:-1] == [8 * 32 * row["step"] for row in rows[:-1]]
    assert 0 < tokens_seen[-1] - tokens_seen[-2] < 8 * 32
    assert (
        tokens_seen[-1] % 32 == 0
        and tokens_seen[-1] - 32 < sum(row["num_valid_tokens"] for row in rows) <= tokens_seen[-1]
    )


def test_resume_warns_about_metrics_of_another_run(tmp_path):
    """The other run made two steps without a checkpoint. Its rows come before the resumed run's."""
    saving = {"checkpoint.enable": "true", "checkpoint.last_save_model_only": "false"}
    starts = [
        {"training.steps": 4, **saving},
        {"training.steps": 5, **saving},
        {"training.steps": 2},
        {"training.steps": 6, **saving},
        {"training.steps": 7, **saving},
    ]
    for changes in starts:
        assert run_ranks(run_one_rank, 1, options(str(tmp_path / "run"), "float32", **changes)) == [
            ExitCode.DONE
        ]
    logs = [(tmp_path / f"run/attempts/{i}/logs/rank0.log").read_text() for i in range(1, 6)]
    assert ["is not the file that this run wrote" in log for log in logs] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert "The checkpoint of step 5 expects" in logs[3] and "the last row of step 2" in logs[3]
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [1, 2, 6, 7]
    # A run in a new folder that starts from the checkpoint of another run expects no rows.
    full_start = {
        "checkpoint.initial_load_path": tmp_path / "run/checkpoint/step-7",
        "checkpoint.initial_load_model_only": "false",
        "training.steps": 8,
        **saving,
    }
    assert run_ranks(
        run_one_rank, 1, options(str(tmp_path / "other"), "float32", **full_start)
    ) == [ExitCode.DONE]
    assert [row["step"] for row in read_rows(tmp_path / "other/metrics.jsonl")] == [8]
    assert (
        "is not the file that this run wrote"
        not in (tmp_path / "other/attempts/1/logs/rank0.log").read_text()
    )


def test_save_config_file_gets_the_resolved_config(tmp_path):
    argv = options(
        str(tmp_path / "run"), "float32", **{"job.save_config_file": "saved/config.json"}
    )
    assert run_ranks(main, 1, [*argv, "--training.steps", "1"]) == [0]
    assert json.loads((tmp_path / "run/saved/config.json").read_text())["training"]["steps"] == 1


def run_with_different_rate(argv):
    """Run on this rank, with another learning rate on rank 1."""
    return run_one_rank([*argv, "--optimizer.lr", "0.1"] if dist.get_rank() else argv)


def test_ranks_with_different_settings_all_exit(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **TWO_RANKS)
    assert run_ranks(run_with_different_rate, 2, argv) == [ExitCode.BAD_CONFIG] * 2
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_kill_switch_prevents_a_start(tmp_path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "KILL").touch()
    argv = options(str(run_folder), "float32", **{"checkpoint.enable": "true", **TWO_RANKS})
    assert run_ranks(run_one_rank, 2, argv) == [ExitCode.INTERRUPTED] * 2
    assert sorted(path.name for path in run_folder.iterdir()) == [
        "KILL",
        "checkpoint",
        "exit.json",
    ], "expected no other files"
    assert json.loads((run_folder / "exit.json").read_text()) == {
        "reason": "interrupted",
        "code": 130,
        "step": 0,
    }


STOPS = {
    "kill switch": ({"resilience.save_switch_path": "KEEP"}, "kill", ExitCode.INTERRUPTED),
    "deadline": ({"resilience.max_runtime_minutes": 1e-9}, "deadline", ExitCode.REQUEUE),
    "host memory": ({"resilience.max_cpu_mem_percent": 1e-9}, "host_memory", ExitCode.REQUEUE),
}


@pytest.mark.parametrize("name", STOPS)
def test_stopped_run_saves_a_checkpoint_and_logs_the_cause(tmp_path, name):
    changes, cause, code = STOPS[name]
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **changes,
        **TWO_RANKS,
        **{"checkpoint.enable": "true", "training.steps": 50},
    )
    assert (
        run_ranks(
            run_and_touch_switch, 2, argv, str(tmp_path / "run/KILL") if cause == "kill" else None
        )
        == [code] * 2
    )
    events = read_rows(tmp_path / "run/events.jsonl")
    assert [row["event"] for row in events].count("start") == 1
    start = events[0]
    assert (start["event"], start["step"], start["source"]) == ("start", 0, "scratch")
    assert start["num_ranks"] == 2 and start["began"] < start["time"]
    end = events[-1]
    assert (end["event"], end["cause"], end["code"]) == ("stop", cause, int(code))
    step = end["step"]
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == list(
        range(1, step + 1)
    )
    assert [s.step for s in published_steps(tmp_path / "run/checkpoint")] == (
        [step] if step else []
    )
    assert step <= 5, "the ranks must agree within two steps"


def run_and_touch_switch(argv, switch, method="train_step"):
    """Run on this rank; create `switch` before `method` ("train_step" or "validate") of step 3."""
    plain = getattr(Trainer, method)

    def touch_and_call(trainer, step, *args):
        if step == 3 and switch:
            Path(switch).touch()
        return plain(trainer, step, *args)

    setattr(Trainer, method, touch_and_call)
    try:
        return run_one_rank(argv)
    finally:
        setattr(Trainer, method, plain)


def test_stop_request_interrupts_validation(tmp_path):
    changes = {
        **TWO_RANKS,
        "training.steps": 50,
        "validation.enable": "true",
        "validation.freq": 3,
        "validation.steps": 20,
        "validation.seq_len": 32,
        "validation.dataset": "shakespeare_validation",
    }
    argv = options(str(tmp_path / "run"), "float32", **changes)
    codes = run_ranks(run_and_touch_switch, 2, argv, str(tmp_path / "run/KILL"), "validate")
    assert codes == [ExitCode.INTERRUPTED] * 2
    assert [row["step"] for row in read_rows(tmp_path / "run/validation.jsonl")] == [1], (
        "an interrupted validation has no loss"
    )
    assert len(read_rows(tmp_path / "run/metrics.jsonl")) <= 5


def validate_with_a_late_batch(argv, late_batch):
    """Validate; the last rank is asked to stop while it waits for a batch. Return the rows."""
    trainer = build(argv)
    (batches,) = trainer.validation.data.validation_sets.values()
    read, rows = batches._read, []

    def late_reader():
        for number, batch in enumerate(read()):
            if number == late_batch and trainer.world.rank == trainer.world.size - 1:
                trainer.requests.add(Request.TERMINATE)
                raise ReadInterrupted
            yield batch

    batches._read = late_reader
    trainer.metrics.validation = lambda *row: rows.append(row)
    trainer.validate(0)
    num_batches, has_stop = len(batches), trainer.requests.has_stop()
    release(trainer)
    return len(rows), num_batches, has_stop


@pytest.mark.parametrize("late_batch", [0, 3, 9, 10])
@pytest.mark.parametrize("layout", ["data_parallel_shard", "tensor_parallel"])
def test_a_late_validation_batch_does_not_hold_up_a_stop(tmp_path, late_batch, layout):
    """All ranks end the validation together, also at its first and last batch; 10 is after it."""
    changes = {
        f"parallelism.{layout}_degree": 2,
        "training.local_batch_size": 4 if layout == "data_parallel_shard" else 8,
        "validation.enable": "true",
        "validation.steps": 20 if layout == "data_parallel_shard" else 10,
        "validation.seq_len": 32,
        "validation.local_batch_size": 2,
        "validation.dataset": "shakespeare_validation",
    }
    argv = options(str(tmp_path / "run"), "float32", **changes)
    first, last = run_ranks(validate_with_a_late_batch, 2, argv, late_batch)
    is_late = late_batch < 10
    assert first == (not is_late, 10, False) and last == (not is_late, 10, is_late)


def test_grace_period_too_short_for_a_checkpoint_is_logged_once(tmp_path):
    saves = {"training.steps": 3, "checkpoint.enable": "true", "checkpoint.interval": 1}
    for name, grace in (("short", 0), ("long", 600)):
        argv = options(
            str(tmp_path / name), "float32", **saves, **{"resilience.grace_seconds": grace}
        )
        assert run_ranks(run_one_rank, 1, argv) == [ExitCode.DONE]
        log = (tmp_path / name / "attempts/1/logs/rank0.log").read_text()
        assert log.count("too short to save a checkpoint") == (grace == 0)


def log_lines(argv):
    """Run on this rank of a pool and return all log lines."""
    lines, root = [], logging.getLogger()
    handler, level = logging.Handler(logging.INFO), root.level
    handler.emit = lambda record: lines.append(record.getMessage())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        run_one_rank(argv)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return lines


def logged_seeds(lines):
    return {
        match[1]
        for match in (re.fullmatch(r"Seed: (\d+) \(debug.seed is unset\)", line) for line in lines)
        if match
    }


def test_rank_0_draws_an_unset_seed_and_a_resume_keeps_it(tmp_path):
    def seed_of_run(name, steps):
        settings = {"debug.seed": "None", "checkpoint.enable": "true", "training.steps": steps}
        settings |= {"checkpoint.last_save_model_only": "false", "training.local_batch_size": 4}
        ranks = run_ranks(log_lines, 2, options(str(tmp_path / name), "float32", **settings))
        seeds = [logged_seeds(lines) for lines in ranks]
        assert len(seeds[0]) == 1 and seeds[0] == seeds[1], "expected the same seed in both logs"
        return seeds[0]

    first = seed_of_run("a", 1)
    assert seed_of_run("a", 2) == first, "a resume must keep the seed"
    assert seed_of_run("b", 1) != first, "another run must draw a new seed"


START_UP_LINES = [
    "Starting job: ",
    "Building 1-D device mesh with ",
    "Checkpoint start: ",
    "Seed: ",
    r"\[GC\] Initial GC collection",
    "Building the tokenizer: ",
    "training data ",
    "Building llama3 debugmodel with ",
    r"Model llama3 debugmodel size: [\d,]+ total parameters",
    "Applied selective activation checkpointing",
    "Applied FSDP",
    "Mixed precision training is handled by ",
    ".*memory usage for model: ",
    "Peak FLOPS used for computing MFU: ",
    "Initial weights from seed 42, hash ",
    "Checkpointing active: ",
    "Trainer is initialized with local batch size 4, global batch size 8 .* total steps 1 ",
    "Training starts at step 1",
    "Profiling active. Traces will be saved at ",
]


def test_startup_log_lines_are_in_order(tmp_path):
    settings = {"training.steps": 1, "training.local_batch_size": 4, "checkpoint.enable": "true"}
    settings |= {"activation_checkpoint.mode": "selective", "profiling.enable_profiling": "true"}
    lines = run_ranks(log_lines, 2, options(str(tmp_path / "run"), "float32", **settings))[0]
    line_numbers = [
        next((i for i, line in enumerate(lines) if re.match(pattern, line)), None)
        for pattern in START_UP_LINES
    ]
    assert None not in line_numbers and line_numbers == sorted(line_numbers), (
        list(zip(START_UP_LINES, line_numbers, strict=True)) + lines
    )


def object_collectives_in_the_loop(argv):
    """Return (name, last step) of each object collective in the training loop of this rank."""
    trainer, calls = build(argv), []
    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    originals = {name: getattr(dist, name) for name in names}
    for name, function in originals.items():

        def count_and_call(*args, name=name, function=function, **kwargs):
            calls.append((name, trainer.progress.step))
            return function(*args, **kwargs)

        setattr(dist, name, count_and_call)
    try:
        trainer.train()
        num_rows = len(calls)
        trainer.world.step_group.gather_objects(None)
        assert len(calls) == num_rows + 1, "the patched functions must be the called ones"
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
        release(trainer)
    return calls[:num_rows]


def test_steps_exchange_no_python_objects(tmp_path):
    """all_gather_object pickles and takes 20 times as long as an all-reduce of tensors."""
    settings = {"training.steps": 4, "training.local_batch_size": 4, "metrics.log_freq": 2}
    argv = options(str(tmp_path / "run"), "float32", **settings)
    assert run_ranks(object_collectives_in_the_loop, 2, argv) == [[], []]
