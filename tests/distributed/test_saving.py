"""Checkpoints of a run: when they are written, their format, and background writes."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import build, options, release
from tests.distributed.test_run import log_lines
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint import saving
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.jsonl import read_rows

SAVING = {
    "checkpoint.enable": "true",
    "checkpoint.last_save_model_only": "false",
    "training.local_batch_size": 4,
}
EXACT = ("step", "n_tokens_seen", "loss", "grad_norm", "lr", "data_digest", "data_digest_chain")


def train(argv):
    """Train to the end and return the exit code."""
    trainer = build(argv)
    try:
        code = trainer.train()
    finally:
        release(trainer)
    return code


def run(folder, *, ranks=2, **overrides):
    assert (
        run_ranks(train, ranks, options(str(folder), "float32", **SAVING | overrides))
        == [ExitCode.DONE] * ranks
    )


def saved_steps(folder, subfolder="checkpoint"):
    return sorted(
        int(path.name.removeprefix("step-")) for path in (folder / subfolder).glob("step-*")
    )


def metric_rows(folder, keys=EXACT):
    rows = read_rows(Path(folder) / "metrics.jsonl")
    return [[v.hex() if isinstance(v := row[key], float) else v for key in keys] for row in rows]


def read_step_manifest(folder, step, subfolder="checkpoint"):
    return json.loads((folder / subfolder / f"step-{step}" / "manifest.json").read_text())


def test_async_and_sync_checkpoints_have_the_same_bytes(tmp_path):
    """Training changes the weights during a background write, which therefore uses a copy."""
    changes = {"training.steps": 5, "checkpoint.interval": 1}
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        run(tmp_path / mode, **changes, **{"checkpoint.async_mode": mode})
        assert saved_steps(tmp_path / mode) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        files = read_step_manifest(tmp_path / "disabled", step)["files"]
        assert {"shard-00000.bin", "shard-00001.bin", ".metadata", "config.toml"} == set(files)
        for mode in ("async", "async_with_pinned_mem"):
            async_files = read_step_manifest(tmp_path / mode, step)["files"]
            for name in ("shard-00000.bin", "shard-00001.bin", ".metadata"):
                path = f"checkpoint/step-{step}/{name}"
                assert (tmp_path / mode / path).read_bytes() == (
                    tmp_path / "disabled" / path
                ).read_bytes(), path
                assert async_files[name] == files[name]


def test_async_and_sync_exports_have_the_same_bytes(tmp_path):
    """The last checkpoint is an export too, and the run waits for it in every mode."""
    changes = {"training.steps": 2, "lr_scheduler.total_steps": 4}
    changes |= {"checkpoint.hf_interval": 1, "checkpoint.hf_shard_gb": 3e-4}
    changes |= {"checkpoint.last_save_model_only": "true", "checkpoint.last_save_in_hf": "true"}
    modes = ("disabled", "async", "async_with_pinned_mem")
    exports = {}
    for mode in modes:
        folder = tmp_path / mode
        run(folder, **changes, **{"checkpoint.async_mode": mode})
        paths = [path for path in (folder / "checkpoint").rglob("*") if path.is_file()]
        names = {path: str(path.relative_to(folder)) for path in paths}
        exports[mode] = {
            name: path.read_bytes() for path, name in names.items() if "safetensors" in name
        }
    expected = exports["disabled"]
    first, last = "checkpoint/hf/step-1", "checkpoint/step-2"
    assert {os.path.dirname(name) for name in expected} == {first, last}
    files = sorted(os.path.basename(name) for name in expected if name.startswith(last))
    assert len(files) == 4, "expected three files and their index"
    assert all(expected[f"{first}/{name}"] != expected[f"{last}/{name}"] for name in files[:3])
    for case, files in exports.items():
        assert files.keys() == expected.keys(), case
        assert [name for name in files if files[name] != expected[name]] == [], case


def train_with_two_folders(argv):
    """Train while rank 1 uses another checkpoint folder, as on a node without the shared one."""
    trainer = build(argv)
    wait_until_visible, saving.wait_until_visible = (
        saving.wait_until_visible,
        partial(saving.wait_until_visible, patience=0.3),
    )
    if dist.get_rank() == 1:
        trainer.checkpointer.folder = trainer.checkpointer.folder.parent / "local"
    try:
        trainer.train()
    except CheckpointError as error:
        return str(error)
    finally:
        saving.wait_until_visible = wait_until_visible
        release(trainer)
    return "no error"


def test_rank_without_the_shared_folder_stops_all_before_any_write(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **SAVING, **{"training.steps": 1})
    for error in run_ranks(train_with_two_folders, 2, argv):
        assert "/local on " in error and "is not the folder that rank 0 sees" in error, error
        assert "Expected a file system that all nodes share" in error
    assert saved_steps(tmp_path / "run") == [] and not list(tmp_path.rglob("shard-*"))


def test_log_names_the_checkpoint_format_and_garbage_collections(tmp_path):
    changes = {"checkpoint.last_save_model_only": "true", "checkpoint.export_dtype": "bfloat16"}
    changes |= {
        "checkpoint.hf_interval": 2,
        "checkpoint.interval": 1,
        "lr_scheduler.total_steps": 3,
    }

    def run_and_log(steps):
        settings = SAVING | changes | {"training.steps": steps}
        return run_ranks(log_lines, 2, options(str(tmp_path / "run"), "float32", **settings))

    def collections(lines):
        matches = (
            re.fullmatch(r"\[GC\] GC collection (.* checkpoint \w+) \d+\.\d\d seconds", line)
            for line in lines
        )
        return [match[1] for match in matches if match]

    expected_collections = ["before checkpoint saving", "after checkpoint saving"]
    for lines in run_and_log(2):
        forms = [
            match[1] for line in lines if (match := re.match(r"Saved .*step-\d \((.*)\) in", line))
        ]
        assert forms == ["full", "weights, bfloat16", "hf, bfloat16"]
        assert collections(lines) == expected_collections * 2
    for lines in run_and_log(3):
        assert collections(lines) == ["after checkpoint loading", *expected_collections * 2]


def train_and_request(argv, requests):
    """Train and create switch files after steps. `requests` maps steps to switch files."""
    trainer = build(argv)
    record = trainer.metrics.record

    def traced(step):
        record(step)
        if trainer.is_leader and step.step in requests:
            (trainer.attempt.run / requests[step.step]).touch()

    trainer.metrics.record = traced
    code = trainer.train()
    release(trainer)
    return code


def test_switch_file_triggers_a_checkpoint_or_export_within_two_steps(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **SAVING, **{"training.steps": 10})
    assert run_ranks(train_and_request, 2, argv, {2: "SAVE", 5: "EXPORT"}) == [ExitCode.DONE] * 2
    (saved,) = [step for step in saved_steps(tmp_path / "run") if step != 10]
    assert saved in (3, 4) and read_step_manifest(tmp_path / "run", saved)["kind"] == "full"
    (exported,) = saved_steps(tmp_path / "run", "checkpoint/hf")
    assert (
        exported in (6, 7)
        and read_step_manifest(tmp_path / "run", exported, "checkpoint/hf")["kind"] == "hf"
    )


def train_until_stop_request(argv, after):
    """Train until a SIGTERM after step `after`, together with an export request."""
    trainer = build(argv)
    record = trainer.metrics.record

    def traced(step):
        record(step)
        if step.step == after:
            (trainer.attempt.run / "EXPORT").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.metrics.record = traced
    with trainer.requests.listening():
        code, step = trainer.train(), trainer.progress.step
    release(trainer)
    return code, step


def test_stop_during_a_background_checkpoint_saves_the_step_once(tmp_path):
    """An export that was requested with the stop is written before the run ends."""
    changes = {"training.steps": 50, "checkpoint.interval": 1, "checkpoint.async_mode": "async"}
    argv = options(str(tmp_path / "run"), "float32", **SAVING | changes)
    (code, step), other = run_ranks(train_until_stop_request, 2, argv, 2)
    assert (code, step) == other and code == ExitCode.REQUEUE
    assert (
        saved_steps(tmp_path / "run")[-1] == step
        and read_step_manifest(tmp_path / "run", step)["kind"] == "full"
    )
    assert saved_steps(tmp_path / "run", "checkpoint/hf") == [step]


def test_export_requested_before_the_last_step_is_written(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **SAVING | {"training.steps": 3})
    assert run_ranks(train_and_request, 2, argv, {2: "EXPORT"}) == [ExitCode.DONE] * 2
    assert saved_steps(tmp_path / "run", "checkpoint/hf") == [3]


def train_and_request_in_last_validation(argv):
    trainer = build(argv)
    validate = trainer.validate

    def request_and_validate(step):
        if trainer.is_leader and step == trainer.config.training.steps:
            (trainer.attempt.run / "EXPORT").touch()
        validate(step)

    trainer.validate = request_and_validate
    code = trainer.train()
    release(trainer)
    return code


def test_export_requested_during_the_last_validation_is_written(tmp_path):
    changes = {
        "training.steps": 3,
        "validation.enable": "true",
        "validation.steps": 2,
        "validation.seq_len": 32,
        "validation.local_batch_size": 2,
        "validation.dataset": "shakespeare_validation",
    }
    argv = options(str(tmp_path / "run"), "float32", **SAVING | changes)
    assert run_ranks(train_and_request_in_last_validation, 2, argv) == [ExitCode.DONE] * 2
    assert (
        saved_steps(tmp_path / "run", "checkpoint/hf") == [3]
        and not (tmp_path / "run/EXPORT").exists()
    )


def train_and_record_publications(argv):
    """Return (step, rows on disk, data position) at the publication of each checkpoint."""
    trainer = build(argv)
    folder, publications, publish = trainer.attempt.run, [], trainer.checkpointer._writer._publish

    def record_and_publish(staged, final, records, content):
        publications.append(
            (content["step"], len(read_rows(folder / "metrics.jsonl")), content["position"])
        )
        assert (content["data"]["position"], content["metrics_bytes"]) == (
            content["position"], (folder / "metrics.jsonl").stat().st_size,
        )  # fmt: skip
        publish(staged, final, records, content)

    trainer.checkpointer._writer._publish = record_and_publish
    trainer.train()
    release(trainer)
    return publications


def test_metrics_are_on_disk_before_a_step_is_published(tmp_path):
    """Otherwise a run killed at this point would resume with missing rows."""
    changes = {"training.steps": 5, "checkpoint.interval": 2, "metrics.log_freq": 100}
    publications, _ = run_ranks(
        train_and_record_publications,
        2,
        options(str(tmp_path / "run"), "float32", **SAVING | changes),
    )
    assert publications == [(step, step, 8 * step) for step in (2, 4, 5)]


def test_interval_in_minutes_triggers_checkpoints(tmp_path):
    """An interval near zero saves every step, at the latest from step 3."""
    run(
        tmp_path / "run",
        **{"training.steps": 6, "checkpoint.interval_minutes": 1e-9, "checkpoint.keep_latest_k": 0},
    )
    assert {3, 4, 5, 6} <= set(saved_steps(tmp_path / "run"))


def test_run_starts_from_a_seed_checkpoint(tmp_path):
    run(tmp_path / "run", ranks=1, **{"checkpoint.create_seed_checkpoint": "true"})
    assert (
        saved_steps(tmp_path / "run") == [0]
        and read_step_manifest(tmp_path / "run", 0)["kind"] == "full"
    )
    run(tmp_path / "run", **{"training.steps": 2})
    run(tmp_path / "straight", **{"training.steps": 2})
    assert metric_rows(tmp_path / "run") == metric_rows(tmp_path / "straight")


def test_load_only_leaves_the_checkpoint_folder_unchanged(tmp_path):
    run(tmp_path / "run", **{"training.steps": 2})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/checkpoint").rglob("*")}
    run(tmp_path / "run", **{"training.steps": 4, "checkpoint.load_only": "true"})
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run/checkpoint").rglob("*")
    } == before


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.nightly  # tests/faults/test_damage.py resumes from damaged steps in every run
def test_run_resumes_from_the_step_before_a_damaged_one(tmp_path):
    changes = {"checkpoint.interval": 2, "lr_scheduler.total_steps": 6}
    run(tmp_path / "straight", **changes, **{"training.steps": 6})
    run(tmp_path / "run", **changes, **{"training.steps": 4})
    damage(tmp_path / "run/checkpoint/step-4/shard-00001.bin")
    run(tmp_path / "run", **changes, **{"training.steps": 6})
    assert metric_rows(tmp_path / "run") == metric_rows(tmp_path / "straight")
    assert saved_steps(tmp_path / "straight") == [2, 4, 6]
    names = sorted(
        path.name.split("-", 2)[:2] for path in (tmp_path / "run/checkpoint").glob("step-*")
    )
    assert len(names) == 4, "the damaged step must be kept under another name"


@pytest.mark.nightly  # tests/integration/test_features.py extends such a run in every run
def test_finished_run_continues_after_a_model_only_checkpoint(tmp_path):
    changes = {
        "checkpoint.interval": 3,
        "checkpoint.last_save_model_only": "true",
        "lr_scheduler.total_steps": 6,
    }
    run(tmp_path / "straight", **changes, **{"training.steps": 6})
    run(tmp_path / "run", **changes, **{"training.steps": 4})
    assert read_step_manifest(tmp_path / "run", 4)["kind"] == "weights"
    run(tmp_path / "run", **changes, **{"training.steps": 6})
    assert metric_rows(tmp_path / "run") == metric_rows(tmp_path / "straight")


TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))
STAGES = {
    PP: 2,
    **{f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")},
}
SIMPLE = {"parallelism.data_parallel_impl": "simple_fsdp"}
CHAINS = {
    "data": [
        (4, {"parallelism.data_parallel_shard_degree": 4}),
        (
            4,
            {
                "parallelism.data_parallel_replicate_degree": 2,
                "parallelism.data_parallel_shard_degree": 2,
            },
        ),
        (2, {}),
        (1, {}),
    ],
    "all": [(4, {}), (4, {TP: 2}), (4, STAGES), (2, {CP: 2}), (4, {**STAGES, TP: 2}), (1, {})],
    "simple_fsdp": [
        (2, SIMPLE),
        (2, {}),
        (
            4,
            {
                **SIMPLE,
                "parallelism.data_parallel_replicate_degree": 2,
                "parallelism.data_parallel_shard_degree": 2,
            },
        ),
        (
            2,
            {
                **SIMPLE,
                "compile.enable": "true",
                "compile.components": "model",
                "compile.backend": "aot_eager",
            },
        ),
        (1, {}),
    ],
}


@pytest.mark.parametrize(
    "chain",
    [pytest.param(name, marks=[] if name == "all" else pytest.mark.nightly) for name in CHAINS],
)
def test_run_continues_on_a_chain_of_layouts(tmp_path, chain):
    """Each layout trains two steps with the same global batch.

    The data are equal to one rank's, and losses differ by at most 1e-5.
    """
    total = 2 * len(CHAINS[chain])
    changes = {
        "lr_scheduler.total_steps": total,
        "training.local_batch_size": 2,
        "checkpoint.async_mode": "async",
    }
    run(tmp_path / "straight", ranks=1, **changes, **{"training.steps": total})
    for number, (ranks, layout) in enumerate(CHAINS[chain], start=1):
        run(tmp_path / "run", ranks=ranks, **changes, **layout, **{"training.steps": 2 * number})
    actual_rows, expected_rows = metric_rows(tmp_path / "run"), metric_rows(tmp_path / "straight")
    exact = [
        EXACT.index(key)
        for key in ("step", "n_tokens_seen", "lr", "data_digest", "data_digest_chain")
    ]
    assert [[row[i] for i in exact] for row in actual_rows] == [
        [row[i] for i in exact] for row in expected_rows
    ]
    for key in ("loss", "grad_norm"):
        i = EXACT.index(key)
        for actual, expected in zip(actual_rows, expected_rows, strict=True):
            assert float.fromhex(actual[i]) == pytest.approx(float.fromhex(expected[i]), rel=1e-5)


def test_simple_fsdp_and_fsdp2_write_the_same_checkpoint_layout(tmp_path):
    """Names, shards and files are equal."""
    for name, impl in (("fsdp2", {}), ("simple", SIMPLE)):
        run(tmp_path / name, **impl, **{"training.steps": 1})
    one, other = (tmp_path / name / "checkpoint/step-1" for name in ("fsdp2", "simple"))
    assert (one / ".metadata").read_bytes() == (other / ".metadata").read_bytes()
    sizes = [
        {path.name: path.stat().st_size for path in folder.glob("shard-*")}
        for folder in (one, other)
    ]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 2


def test_run_starts_from_another_runs_safetensors_checkpoint(tmp_path):
    """The last checkpoint has Hugging Face's format; interval checkpoints stay native."""
    hf = {"checkpoint.last_save_model_only": "true", "checkpoint.last_save_in_hf": "true"}
    run(tmp_path / "run", **hf, **{"training.steps": 4, "checkpoint.interval": 2})
    assert [read_step_manifest(tmp_path / "run", step)["kind"] for step in (2, 4)] == ["full", "hf"]
    source = {
        "checkpoint.initial_load_path": tmp_path / "run/checkpoint/step-4",
        "checkpoint.initial_load_in_hf": "true",
    }
    first = run_ranks(first_loss, 2, options(str(tmp_path / "hf"), "float32", **SAVING, **source))
    native = {"training.steps": 4, "checkpoint.interval": 2}
    run(tmp_path / "native", **native)
    source = {"checkpoint.initial_load_path": tmp_path / "native/checkpoint/step-4"}
    assert first == run_ranks(
        first_loss, 2, options(str(tmp_path / "warm"), "float32", **SAVING, **source)
    )


def first_loss(argv):
    """Return the loss of the first step as a hex string."""
    trainer = build(argv)
    assert trainer.progress.step == 0
    fetched = trainer.fetch(1)
    record = trainer.train_step(1, fetched, fetched.agreement.wait())
    loss = record.loss_share.double()
    dist.all_reduce(loss)
    release(trainer)
    return loss.item().hex()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_model_only_checkpoint_has_the_export_dtype(tmp_path, dtype):
    changes = {"checkpoint.last_save_model_only": "true", "checkpoint.export_dtype": dtype}
    run(tmp_path / "run", **changes, **{"training.steps": 2})
    metadata = (tmp_path / "run/checkpoint/step-2/.metadata").read_bytes()
    import pickle

    dtypes = {
        entry.properties.dtype for entry in pickle.loads(metadata).state_dict_metadata.values()
    }
    assert dtypes == {getattr(torch, dtype)}
    source = {"checkpoint.initial_load_path": tmp_path / "run/checkpoint/step-2"}
    assert run_ranks(first_loss, 2, options(str(tmp_path / "warm"), "float32", **SAVING, **source))
