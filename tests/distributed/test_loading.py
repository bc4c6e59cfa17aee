"""Runs that start from a full or partial checkpoint, and starts that fail."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_in_new_processes, run_ranks
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.distributed.initialize import weight_hash
from torchtitan_like.distributed.world import HostGroup, LaunchedAs
from torchtitan_like.resilience.agreement import Requests
from torchtitan_like.resilience.heartbeat import RankPosition
from torchtitan_like.run import resolve_run, run_job
from torchtitan_like.util.exit_codes import ExitCode

SAVING = {
    "checkpoint.enable": "true",
    "checkpoint.last_save_model_only": "false",
    "training.local_batch_size": 4,
}


def train(argv):
    """Train to the end and return the exit code."""
    trainer = build(argv)
    code = trainer.train()
    release(trainer)
    return code


def state_at_start(argv):
    """Return the state of a run before its first step.

    The values are: step, tokens seen, position, hash of the weights, Adam's step.
    """
    trainer = build(argv)
    shares = trainer.world.step_group.gather_objects(weight_hash(trainer.parts[0]))
    saved = json.loads(trainer.states["dataloader"].state_dict()["json"])
    fetched = trainer.fetch(trainer.progress.step + 1)
    first = min(trainer.world.step_group.gather_objects(fetched.batch.first_samples[0]))
    adam_step = trainer.optim.optimizer.state_dict()["state.norm.weight.step"].item()
    fetched.agreement.wait()
    progress = trainer.progress
    release(trainer)
    assert saved["position"] == progress.position == first, (
        "the data position differs before the first step"
    )
    return progress.step, progress.n_tokens_seen, progress.position, sum(shares) % 2**64, adam_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 3 steps of 8 samples of 32 tokens, with a checkpoint."""
    folder = tmp_path_factory.mktemp("loading") / "run"
    run_ranks(train, 2, options(str(folder), "float32", **SAVING, **{"training.steps": 3}))
    return folder


@pytest.fixture(scope="module")
def hashes(folder):
    """Return the hashes of the initial and of the trained weights."""
    new = run_ranks(state_at_start, 2, options(str(folder.parent / "new"), "float32", **SAVING))[0]
    trained = run_ranks(state_at_start, 2, options(str(folder), "float32", **SAVING))[0]
    assert new[3] != trained[3]
    return {"new": new[3], "trained": trained[3]}


@pytest.mark.parametrize(
    ("excluded", "tokens", "position", "weights", "adam_step"),
    [
        ("", 768, 24, "trained", 3),
        ("dataloader", 768, 0, "trained", 3),
        ("train_state", 0, 24, "trained", 3),
        ("train_state,dataloader", 0, 0, "trained", 3),
        ("optimizer", 768, 24, "trained", 0),
        ("model", 768, 24, "new", 3),
        ("model,optimizer,lr_scheduler", 768, 24, "new", 0),
        ("model,optimizer,lr_scheduler,dataloader,train_state", 0, 0, "new", 0),
    ],
)
def test_excluded_states_start_fresh_and_the_others_resume(
    folder, hashes, excluded, tokens, position, weights, adam_step
):
    changes = {"checkpoint.exclude_from_loading": excluded} if excluded else {}
    for state in run_ranks(state_at_start, 2, options(str(folder), "float32", **SAVING, **changes)):
        assert state == (3, tokens, position, hashes[weights], adam_step)


@pytest.mark.parametrize("tied", ["false", "true"])
def test_warm_start_loads_only_the_weights(tmp_path, tied):
    changes = {"training.steps": 2, "model.args.enable_weight_tying": tied}
    first = options(str(tmp_path / "first"), "float32", **SAVING, **changes)
    run_ranks(train, 2, first)
    changes |= {"training.steps": 3}
    trained = run_ranks(
        state_at_start, 2, options(str(tmp_path / "first"), "float32", **SAVING, **changes)
    )[0]
    changes["checkpoint.initial_load_path"] = tmp_path / "first/checkpoint/step-2"
    state = run_ranks(
        state_at_start, 2, options(str(tmp_path / "second"), "float32", **SAVING, **changes)
    )[0]
    assert state == (0, 0, 0, trained[3], 0)
    changes |= {"model.args.n_heads": 8, "model.args.n_kv_heads": 4}
    changes["model.args.rope_theta"] = 20000.0
    run_ranks(state_at_start, 2, options(str(tmp_path / "third"), "float32", **SAVING, **changes))
    logs = [
        (tmp_path / f"{run}/attempts/1/logs/rank0.log").read_text() for run in ("second", "third")
    ]
    line = "n_heads 4 -> 8; model.args.n_kv_heads 2 -> 4; model.args.rope_theta "
    assert [line in log for log in logs] == [False, True]


INTERVAL = {**SAVING, "checkpoint.interval": 2}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """The folder of a run of 4 steps."""
    folder = tmp_path_factory.mktemp("loading") / "run"
    run_ranks(train, 2, options(str(folder), "float32", **INTERVAL, **{"training.steps": 4}))
    return folder


def start_error(argv):
    try:
        build(argv)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"optimizer.lr": 1e-3, "model.args.dim": 64},
            "model.args.dim 32 -> 64; optimizer.lr 0.0008 -> 0.001. "
            "Expected the stored values. For a new run set another job.dump_folder",
        ),
        (
            {"model.args.n_layers": 3, "checkpoint.allow_change": "model.args.n_layers"},
            "model.layers.2.attention.wq.weight is not in the checkpoint",
        ),
        (
            {"model.args.n_layers": 1, "checkpoint.allow_change": "model.args.n_layers"},
            "model.layers.1.attention.wq.weight is in the checkpoint but not in this run",
        ),
        ({"model.args.dim": 64, "checkpoint.allow_change": "model.args.dim"}, "this run needs"),
        (
            {"training.dtype": "bfloat16", "checkpoint.allow_change": "training.dtype"},
            "is torch.float32, this run needs torch.bfloat16",
        ),
    ],
)
def test_failed_start_leaves_the_checkpoint_folder_unchanged(
    two_checkpoints, tmp_path, changes, words
):
    """Every rank raises the error, and later steps keep their names."""
    shutil.copytree(two_checkpoints, tmp_path / "run")
    load_options = {**INTERVAL, "checkpoint.load_step": 2, **changes}
    for error in run_ranks(
        start_error, 2, options(str(tmp_path / "run"), "float32", **load_options)
    ):
        assert words in error
    assert sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir()) == [
        "step-2",
        "step-4",
    ]


def test_successful_start_renames_later_steps(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints, tmp_path / "run")
    load_options = {**INTERVAL, "checkpoint.load_step": 2}
    argv = options(str(tmp_path / "run"), "float32", **load_options)
    assert run_ranks(state_at_start, 2, argv)[0][0] == 2
    names = sorted(
        path.name.split(".superseded")[0] for path in (tmp_path / "run/checkpoint").iterdir()
    )
    assert names == ["step-2", "step-4"]
    assert not (tmp_path / "run/checkpoint/step-4").exists()


def start_step_with_late_files(argv, late_folder):
    """Return the step that a run starts from, while rank 1 first misses the files of a folder."""
    stat, missed = Path.stat, []

    def delayed_stat(path, **options):
        if os.environ["RANK"] == "1" and path.parent == late_folder and len(missed) < 5:
            missed.append(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, **options)

    Path.stat = delayed_stat
    try:
        return state_at_start(argv)[0]
    finally:
        Path.stat = stat


def test_start_waits_for_a_step_that_one_node_sees_late(two_checkpoints, tmp_path):
    """Rank 0 sees the whole step, so the run must use it and must not rename it."""
    shutil.copytree(two_checkpoints, tmp_path / "run")
    argv = options(str(tmp_path / "run"), "float32", **INTERVAL)
    assert run_ranks(start_step_with_late_files, 2, argv, tmp_path / "run/checkpoint/step-4") == [
        4,
        4,
    ]
    assert sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir()) == [
        "step-2",
        "step-4",
    ]


def gathered_during_start(argv):
    """Return the pickled objects that this rank gathers before its first step."""
    sent, gather = [], HostGroup.gather_objects

    def recording_gather(group, value):
        sent.append(pickle.dumps(value))
        return gather(group, value)

    HostGroup.gather_objects = recording_gather
    try:
        release(build(argv))
    finally:
        HostGroup.gather_objects = gather
    return sent


def test_ranks_do_not_gather_parameter_names(folder):
    """The names of a 405B model take 0.3 MB, so 16,384 ranks would gather 5 GB."""
    for sent in run_ranks(gathered_during_start, 2, options(str(folder), "float32", **SAVING)):
        assert sent and not any(b"attention.wq" in value for value in sent)


def test_read_error_on_one_rank_is_raised_on_all_ranks(folder):
    """The other ranks do not wait in a collective."""
    errors = run_ranks(start_with_read_error, 2, options(str(folder), "float32", **SAVING))
    message = r"rank 1: .*: No such file or directory\. Expected an existing path"
    assert all(re.search(message, error) and "rank 0" not in error for error in errors), errors


def start_with_read_error(argv):
    import torch.distributed as dist

    from torchtitan_like.checkpoint import dcp_source

    read = dcp_source.read_metadata

    def fail_on_read(*_, **__):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), ".metadata")

    if dist.get_rank() == 1:
        dcp_source.read_metadata = fail_on_read
    try:
        return start_error(argv)
    finally:
        dcp_source.read_metadata = read


def run_one_rank(argv):
    return run_job(resolve_run(argv, 1), LaunchedAs(0, 0, 1), Requests(), RankPosition())


def run_and_check_exit_file(argv):
    """Return the exit code, and whether exit.json existed before the checkpointer closed."""
    from torchtitan_like.checkpoint.step_folders import Retention

    close, has_exit_file = Retention.close, []

    def check_exit_file(retention):
        has_exit_file.append((retention.folder.parent / "exit.json").exists())
        close(retention)

    Retention.close = check_exit_file
    try:
        return run_one_rank(argv), has_exit_file
    finally:
        Retention.close = close


def test_exit_json_is_written_before_waiting_for_deletions(tmp_path):
    argv = options(
        str(tmp_path / "run"), "float32", **{"checkpoint.enable": "true", "training.steps": 1}
    )
    assert run_ranks(run_and_check_exit_file, 1, argv) == [(ExitCode.DONE, [True])]


def test_finished_run_with_a_model_only_checkpoint_exits_with_done(tmp_path):
    argv = options(
        str(tmp_path / "run"), "float32", **{"checkpoint.enable": "true", "training.steps": 2}
    )
    assert run_ranks(run_one_rank, 1, argv) == [ExitCode.DONE]
    assert run_ranks(run_one_rank, 1, argv) == [ExitCode.DONE]
    assert sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir()) == ["step-2"]
    assert len(list((tmp_path / "run/attempts").iterdir())) == 1, (
        "the second start must not create an attempt"
    )
    longer = options(
        str(tmp_path / "run"), "float32", **{"checkpoint.enable": "true", "training.steps": 4}
    )
    assert run_ranks(run_one_rank, 1, longer) == [ExitCode.BAD_CONFIG]
    assert (tmp_path / "run/checkpoint/step-2").exists()


def train_with_signals(argv):
    """Send a signal after step 2, and two more during the resulting checkpoint."""
    trainer = build(argv)
    writer = trainer.checkpointer._writer
    record, write = trainer.metrics.record, writer._write_native

    def traced(step):
        record(step)
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def write_slowly(*args):
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)
        return write(*args)

    trainer.metrics.record, writer._write_native = traced, write_slowly
    with trainer.requests.listening():
        code = trainer.train()
    step = trainer.progress.step
    release(trainer)
    return code, step


def test_repeated_signals_do_not_interrupt_the_last_checkpoint(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **SAVING, **{"training.steps": 50})
    endings = run_in_new_processes(train_with_signals, 2, argv)
    code, step = endings[0]
    assert endings == [(ExitCode.REQUEUE, step)] * 2 and step <= 4
    assert Path(tmp_path / "run" / "checkpoint" / f"step-{step}" / "manifest.json").exists()
