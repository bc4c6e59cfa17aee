"""A run that is stopped in any way and resumed writes the metrics of an uninterrupted run.

Runs that receive SIGTERM or stop with non-finite numbers use torchrun, whose workers must return 0.
Other runs have forked ranks. The metrics of both kinds are bit-equal.
"""

import json
import signal
import subprocess
import time

import pytest

from tests.distributed.parity import short_documents
from tests.faults.trainer import kill
from tests.harness.runner import (
    EXACT,
    ROOT,
    kill_session,
    run_trainer,
    trainer_command,
    trainer_environment,
)
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

STEPS = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A dataset of about 40 samples: 24 steps of 4 samples contain the ends of two epochs."""
    path = short_documents(tmp_path_factory.mktemp("text"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:60]))
    return path


def arguments(text, folder, **overrides):
    values = {
        "job.dump_folder": folder,
        "model.hf_assets_path": ROOT / "tests/assets/tokenizer",
        "model.args.dim": 32,
        "model.args.n_layers": 2,
        "model.args.n_heads": 4,
        "training.dataset_path": text,
        "training.seq_len": 32,
        "training.global_batch_size": 4,
        "training.local_batch_size": 2,
        "training.steps": STEPS,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 3,
        "lr_scheduler.total_steps": STEPS,
        "data.cache_folder": text.parent / "tokens",
        "checkpoint.enable": "true",
        "checkpoint.interval": 4,
        "checkpoint.last_save_model_only": "false",
        "metrics.log_freq": 1,
        "debug.seed": 1,
        **overrides,
    }
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def exact_rows(folder):
    """Return the EXACT keys of every row, with floats as hex strings."""
    rows = read_rows(folder / "metrics.jsonl")
    return [[v.hex() if isinstance(v := row[key], float) else v for key in EXACT] for row in rows]


def last_step(folder):
    """Return the newest step with a complete row on disk."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def wait_for_step(step, folder, is_over):
    """Wait until the row of `step` is on disk. Raise AssertionError if the run ends before."""
    deadline = time.monotonic() + 120
    while last_step(folder) < step:
        assert not is_over() and time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def terminate(arguments, ngpu, folder, step):
    """Start a run under torchrun and send SIGTERM after `step`; return the output of all ranks."""
    process = subprocess.Popen(
        trainer_command(arguments, ngpu, folder), cwd=ROOT, env=trainer_environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_step(step, folder, lambda: process.poll() is not None)
    except AssertionError as problem:
        raise AssertionError(f"{problem}:\n{kill_session(process)[-3000:]}") from None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    return output


def kill_after_step(arguments, ngpu, folder, step, fork_server):
    """Start a run with forked ranks and kill all of them after `step`."""
    run = fork_server.start(arguments, ngpu, folder)
    wait_for_step(step, folder, run.is_over)
    kill(list(run.pids().values()))
    assert run.wait().codes == [-signal.SIGKILL] * ngpu


@pytest.fixture(scope="module")
def uninterrupted(text, run_forked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "outputs"
    result = run_forked(arguments(text, folder), 2, folder)
    assert result.returncode == 0, result.tail
    rows = exact_rows(folder)
    assert [row[0] for row in rows] == list(range(1, STEPS + 1))
    return rows


def test_run_stopped_at_7_and_killed_at_13_equals_uninterrupted_run(
    text, uninterrupted, fork_server, run_forked, tmp_path
):
    folder = tmp_path / "outputs"
    first = run_forked(arguments(text, folder, **{"training.steps": 7}), 2, folder)
    assert first.exit == {"reason": "done", "code": 0, "step": 7}, first.tail
    kill_after_step(arguments(text, folder), 2, folder, 13, fork_server)
    last = run_forked(arguments(text, folder), 2, folder)
    assert "resume from" in last.stdout
    assert last.returncode == 0, last.tail
    assert exact_rows(folder) == uninterrupted


@pytest.mark.nightly
def test_run_with_load_step_resumes_after_a_kill(
    text, uninterrupted, fork_server, run_forked, tmp_path
):
    """The command of the resume still contains load_step."""
    folder = tmp_path / "outputs"
    run_forked(arguments(text, folder, **{"training.steps": 12}), 2, folder)
    command = arguments(text, folder, **{"checkpoint.load_step": 4, "checkpoint.keep_latest_k": 2})
    kill_after_step(command, 2, folder, 17, fork_server)
    last = run_forked(command, 2, folder)
    assert "checkpoint/step-16 at step 16" in last.stdout
    assert exact_rows(folder) == uninterrupted
    steps = sorted(
        path.name.partition(".superseded")[0] for path in (folder / "checkpoint").glob("step-*")
    )
    assert steps == ["step-20", "step-24", "step-4"], "the superseded steps 8 and 12 must expire"


def test_sigterm_saves_a_checkpoint_and_returns_the_requeue_code(
    text, uninterrupted, run_forked, tmp_path
):
    folder = tmp_path / "outputs"
    output = terminate(arguments(text, folder, **{"checkpoint.interval": 1000}), 2, folder, 5)
    stopped = read_rows(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / "exit.json").read_text().count('"code": 75'), output[-3000:]
    assert (folder / "checkpoint" / f"step-{stopped}" / "manifest.json").exists(), output[-3000:]
    last = run_forked(arguments(text, folder), 2, folder)
    assert last.returncode == 0, last.tail
    assert exact_rows(folder) == uninterrupted


@pytest.mark.nightly  # tests/distributed/test_saving.py resumes on other layouts in every run
def test_resume_on_other_numbers_of_ranks_gives_the_same_losses(
    text, uninterrupted, run_forked, tmp_path
):
    """The run uses 2 ranks, then 1, then 4, with the same global batch."""
    folder = tmp_path / "outputs"
    for steps, ngpu, local in ((8, 2, 2), (16, 1, 4), (STEPS, 4, 1)):
        changes = {"training.steps": steps, "training.local_batch_size": local}
        result = run_forked(arguments(text, folder, **changes), ngpu, folder)
        assert result.returncode == 0, result.tail
    rows = exact_rows(folder)
    column = {key: i for i, key in enumerate(EXACT)}
    for key in (
        "step",
        "n_tokens_seen",
        "num_valid_tokens",
        "lr",
        "data_digest",
        "data_digest_chain",
        "skipped",
    ):
        assert [row[column[key]] for row in rows] == [row[column[key]] for row in uninterrupted], (
            key
        )
    for actual, expected in zip(rows, uninterrupted, strict=True):
        assert float.fromhex(actual[column["loss"]]) == pytest.approx(
            float.fromhex(expected[column["loss"]]), rel=1e-5
        )


def test_finished_run_exits_immediately(text, run_forked, tmp_path):
    folder = tmp_path / "outputs"
    short = arguments(text, folder, **{"training.steps": 4})
    run_forked(short, 1, folder)
    second = run_forked(short, 1, folder)
    assert second.returncode == 0
    assert "Nothing to do: step 4 of 4 is done already" in second.stdout
    assert "Building llama3" not in second.stdout
    changed = arguments(text, folder, **{"training.steps": 3, "optimizer.lr": 0.5})
    third = run_forked(changed, 1, folder)
    assert third.returncode == ExitCode.BAD_CONFIG
    assert "has a finished run with other settings: optimizer.lr" in third.stdout
    assert "set another job.dump_folder" in third.stdout


@pytest.mark.nightly
def test_nonfinite_steps_change_no_weight_and_stop_all_ranks(text, tmp_path):
    folder = tmp_path / "outputs"
    # The first update makes the weights huge, so the second loss is not finite.
    changes = {"optimizer.lr": 1e30, "lr_scheduler.warmup_steps": 0, "checkpoint.interval": 1000}
    result = run_trainer(arguments(text, folder, **changes), 2, folder)
    assert result.returncode == 0, result.tail
    assert result.exit == {"reason": "bad_numbers", "code": 70, "step": 1}, result.tail
    skipped = [row["step"] for row in result.metrics if row["skipped"]]
    assert skipped[0] == 2 and len(skipped) <= 3, "expected a stop at most two steps later"
    manifest = folder / "checkpoint" / "step-1" / "manifest.json"
    assert manifest.exists(), "the weights before the non-finite step must be saved"
