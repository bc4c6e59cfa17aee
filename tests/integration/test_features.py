"""What an option promises, seen from outside: rows of runs of the whole trainer, each asserting on losses and files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.distributed.parity import short_documents
from tests.harness.runner import ROOT, OverrideDefinitions, RunResult, run_row
from torchtitan_like.monitor.jsonl import read_rows

STEPS = 6
SEQ_LEN = 32
# A tiny model whose loss falls within a few steps; clipping never acts, since one option of the table cannot clip.
TINY = {
    "model.args.dim": 32,
    "model.args.n_layers": 2,
    "model.args.n_heads": 4,
    "model.args.multiple_of": 16,
    "training.dataset_path": "{files}/text.jsonl",
    "training.seq_len": SEQ_LEN,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": STEPS,
    "training.max_norm": 100,
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": STEPS,
    "data.cache_folder": "{files}/tokens",
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
    "validation.enable": "false",
    "validation.dataset_path": "{files}/held_out.jsonl",
    "validation.seq_len": SEQ_LEN,
    "validation.local_batch_size": 2,
    "validation.steps": -1,
    "validation.freq": 3,
}
# The keys of a step that do not depend on how the numbers are computed, and those of the log step's row besides.
DATA_KEYS = ("step", "n_tokens_seen", "num_valid_tokens", "lr", "data_digest", "data_digest_chain", "skipped")
EXACT_KEYS = {*DATA_KEYS, "loss", "max_loss", "grad_norm"}
MEASURED_KEYS = {"time", "data_loading_s"}
LOG_STEP_KEYS = {"tps", "tflops", "memory_gib", "step_s", "mean_data_loading_s", "data_loading_percent"}


@dataclass(frozen=True)
class Feature(OverrideDefinitions):
    """A row whose last run reads the reference run's data and, within ``rtol``, has its losses and gradient norms."""

    rtol: float | None = None


def options(*flags: str, **values: object) -> list[str]:
    """Arguments of one run: ``flags`` as they are; a key's dots are written as two underscores."""
    chosen = {**TINY, **{key.replace("__", "."): value for key, value in values.items()}}
    return [part for key, value in chosen.items() for part in (f"--{key}", str(value))] + list(flags)


def losses(rows: Iterable[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def saved_steps(run: RunResult) -> dict[str, str]:
    """Name and kind of every published checkpoint that is left, oldest first."""
    folders = sorted((run.dump_folder / "checkpoint").glob("step-*"), key=lambda path: path.stat().st_mtime)
    return {path.name: json.loads((path / "manifest.json").read_text())["kind"] for path in folders}


def logged(run: RunResult) -> list[str]:
    """The log lines of rank 0's newest attempt."""
    newest = max((run.dump_folder / "attempts").iterdir(), key=lambda path: int(path.name))
    return [line.partition(" - INFO - ")[2] or line for line in (newest / "logs/rank0.log").read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads in a folder of event files: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


# ---- what rows expect


def expect_default(runs: list[RunResult]) -> None:
    """Traces of both ranks, TensorBoard, all keys of metrics.jsonl, the step line, a run folder that explains itself."""
    (run,) = runs
    assert run.exit == {"reason": "done", "code": 0, "step": STEPS}
    traces = {path.relative_to(run.dump_folder).as_posix() for path in run.dump_folder.glob("profile_traces/**/*.json")}
    assert traces == {f"profile_traces/iteration_{step}/rank{r}_trace.json" for step in (3, 6) for r in (0, 1)}
    for trace in traces:
        assert json.loads((run.dump_folder / trace).read_text())["traceEvents"]
    for row in run.metrics:
        is_log_step = row["step"] in (1, 2, 4, 6)
        assert row.keys() == EXACT_KEYS | MEASURED_KEYS | (LOG_STEP_KEYS if is_log_step else set())
    expect_tensorboard(run)
    expect_step_lines(run)
    assert {"config.toml", "metrics.jsonl", "validation.jsonl", "events.jsonl", "exit.json", "torchrun", "tb"} <= {
        path.name for path in run.dump_folder.iterdir()
    }


def expect_tensorboard(run: RunResult) -> None:
    (folder,) = (run.dump_folder / "tb").iterdir()
    tags = scalars(folder)
    log_steps = [row for row in run.metrics if row["step"] in (1, 2, 4, 6)]
    names = {"loss_metrics/global_avg_loss": "loss", "loss_metrics/global_max_loss": "max_loss",
             "grad_norm": "grad_norm", "lr": "lr", "n_tokens_seen": "n_tokens_seen", "throughput(tps)": "tps",
             "tflops": "tflops", "time_metrics/end_to_end(s)": "step_s",
             "time_metrics/data_loading(s)": "mean_data_loading_s",
             "time_metrics/data_loading(%)": "data_loading_percent"}  # fmt: skip
    for tag, key in names.items():
        assert tags[tag] == [(row["step"], pytest.approx(row[key])) for row in log_steps], tag
    validation = read_rows(run.dump_folder / "validation.jsonl")
    assert tags["validation_metrics/loss"] == [(row["step"], pytest.approx(row["loss"])) for row in validation]
    assert {"memory/rss(GiB)", "validation_metrics/throughput(tps)"} <= tags.keys()


def expect_step_lines(run: RunResult) -> None:
    lines = [line for line in logged(run) if line.startswith("step:")]
    pattern = (
        r"step: +(\d+)  loss: +([\d.]+)  grad_norm: +([\d.]+)  memory: +[\d.]+GiB\([\d.]+%\)  tps: [\d,]+  "
        r"tflops: [\d.,]+  mfu: n/a  ([\d.]+)% eta \d+:\d\d:\d\d"
    )
    shown = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    rows = [row for row in run.metrics if row["step"] in (1, 2, 4, 6)]
    assert shown == [
        (str(row["step"]), f"{row['loss']:.4f}", f"{row['grad_norm']:.4f}", f"{100 * row['step'] / STEPS:.1f}")
        for row in rows
    ], lines


def expect_all_ranks_on_the_board(runs: list[RunResult]) -> None:
    (run,) = runs
    files = list((run.dump_folder / "tb").glob("**/events.out.tfevents.*"))
    boards = [scalars(file.parent) for file in files]
    assert sorted(file.parent.name.startswith("rank_1") for file in files) == [False, True], files
    assert boards[0]["loss_metrics/global_avg_loss"] == boards[1]["loss_metrics/global_avg_loss"]
    assert "gradient accumulation steps 2" in run.stdout


def expect_retention_and_extension(runs: list[RunResult]) -> None:
    """A last save of weights alone: the run goes on from the last full one, and no step stands twice."""
    first, extended = runs
    assert saved_steps(first) == {"step-4": "full", "step-6": "weights"}, "the two newest"
    saves = [row for row in read_rows(first.dump_folder / "events.jsonl") if row["event"] == "save"]
    assert [row["step"] for row in saves if row["attempt"] == 1] == [1, 2, 4, 6], "enable_first_step_checkpoint"
    assert f"resume from {first.dump_folder}/checkpoint/step-4 at step 4" in extended.stdout
    assert [row["step"] for row in extended.metrics] == list(range(1, 9))
    assert losses(extended.metrics)[:STEPS] == losses(first.metrics)
    (superseded,) = (first.dump_folder / "checkpoint").glob("*.superseded-*")
    assert superseded.name.startswith("step-6.")
    assert json.loads((first.dump_folder / "checkpoint/step-8/manifest.json").read_text())["kind"] == "weights"


def expect_parts_left_out(runs: list[RunResult]) -> None:
    """Without the saved data position the text starts anew; the weights go on."""
    first, second = runs
    assert [row["step"] for row in second.metrics] == [1, 2, 3, 4]
    assert second.metrics[3]["data_digest"] == first.metrics[0]["data_digest"]
    assert second.metrics[3]["loss"] < first.metrics[0]["loss"] - 0.1
    assert "(not loaded: dataloader, lr_scheduler)" in second.stdout
    assert "learning-rate schedule has changed" not in second.stdout, "the saved one was not looked at"


def expect_the_same_text(runs: list[RunResult]) -> None:
    """Text files, parquet and the tiktoken form of the tokenizer give the tokens of the jsonl file."""
    for run in runs[1:]:
        assert [[row[key] for key in EXACT_KEYS] for row in run.metrics] == [
            [row[key] for key in EXACT_KEYS] for row in runs[0].metrics
        ]
    tokenizer = json.loads(next((runs[-1].dump_folder / "attempts").glob("4/environment/facts.json")).read_text())
    assert any("tokenizer.model" in argument for argument in tokenizer["argv"])


def expect_an_end_with_the_data(runs: list[RunResult]) -> None:
    """The last, partial batch is trained on; the end is a good one, and more epochs extend it."""
    ended, extended = runs
    last = ended.metrics[-1]
    full_batch = 8 * SEQ_LEN
    assert ended.exit == {"reason": "done", "code": 0, "step": last["step"]}
    assert 3 <= last["step"] < 20
    assert saved_steps(ended) == {f"step-{last['step']}": "full"}
    num_tokens = int(re.search(r"training text text .* ([\d,]+) tokens =", ended.stdout)[1].replace(",", ""))
    counts = [row["num_valid_tokens"] for row in ended.metrics]
    assert sum(counts) == num_tokens - 1, "every token but the first was a label once"
    assert counts[:-1] == [full_batch] * (len(counts) - 1) and 0 < counts[-1] < full_batch
    assert extended.exit == {"reason": "done", "code": 0, "step": extended.metrics[-1]["step"]}
    assert extended.metrics[: last["step"]] == ended.metrics
    assert sum(row["num_valid_tokens"] for row in extended.metrics) == 2 * (num_tokens - 1)


ROWS = [
    Feature(
        [options("--profiling.enable_profiling", "--validation.enable", "--metrics.enable_tensorboard",
                 profiling__profile_freq=3, profiling__profiler_warmup=1, metrics__log_freq=2)],
        "Two ranks are one rank; profiling, TensorBoard, validation",
        "default",
        expect=expect_default,
        rtol=1e-5,
    ),
    Feature(
        [options("--metrics.enable_tensorboard", "--metrics.save_for_all_ranks", training__local_batch_size=1)],
        "Two micro-batches on each rank; every rank writes its own TensorBoard file",
        "gradient_accumulation",
        expect=expect_all_ranks_on_the_board,
        rtol=1e-5,
    ),
    Feature(
        [options("--optimizer.early_step_in_backward")],
        "Each parameter is updated within backward, from the same gradients",
        "optimizer_in_backward",
        rtol=1e-5,
    ),
    Feature(
        [options(training__mixed_precision_param="bfloat16")],
        "bfloat16 computes nearly what float32 does",
        "mixed_precision",
        rtol=5e-3,
    ),
    Feature(
        [options("--compile.enable", "--compile.backend", "aot_eager", optimizer__implementation="foreach")],
        "Compiled blocks and loss, and another implementation of AdamW",
        "compile_and_foreach",
        ngpu=1,
        rtol=1e-5,
    ),
    Feature(
        [options("--checkpoint.enable", *extra, checkpoint__interval=2, checkpoint__keep_latest_k=2,
                 checkpoint__last_save_model_only="true", training__steps=steps)
         for steps, extra in ((STEPS, ["--checkpoint.enable_first_step_checkpoint"]), (STEPS + 2, []))],
        "First-step save, retention, and going on after a last save of weights alone",
        "retention_and_extension",
        ngpu=1,
        expect=expect_retention_and_extension,
    ),
    Feature(
        [options("--checkpoint.enable", training__steps=3),
         options("--checkpoint.enable", training__steps=4, lr_scheduler__total_steps=4,
                 checkpoint__exclude_from_loading="dataloader,lr_scheduler")],
        "Data position and schedule stay out of a resume",
        "exclude_from_loading",
        ngpu=1,
        expect=expect_parts_left_out,
    ),
    Feature(
        [options(*extra, training__steps=2, training__dataset_path="{files}/" + text)
         for text, extra in (("text.jsonl", []), ("folder", []), ("text.parquet", []), (
             "text.jsonl", ["--model.hf_assets_path", "tests/assets/tokenizer/tokenizer.model"]))],
        "One text as jsonl, as text files, as parquet, and through the tiktoken file",
        "text_formats",
        ngpu=1,
        expect=expect_the_same_text,
    ),
    Feature(
        [options("--checkpoint.enable", training__steps=20, training__global_batch_size=8,
                 data__sources__text__path="{files}/text.jsonl", data__sources__text__max_epochs=epochs)
         for epochs in (1, 2)],
        "The text ends before the steps do; a second epoch goes on from there",
        "data_ends",
        ngpu=1,
        expect=expect_an_end_with_the_data,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text of 30 short documents as jsonl, text files and parquet, another to validate on."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("files")
    lines = short_documents(folder).read_text().splitlines(keepends=True)
    (folder / "text.jsonl").write_text("".join(lines[:30]))
    (folder / "held_out.jsonl").write_text("".join(lines[30:]))
    texts = [json.loads(line)["text"] for line in lines[:30]]
    (folder / "folder").mkdir()
    for number, text in enumerate(texts):
        (folder / "folder" / f"{number:02}.txt").write_text(text)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")
    return folder


def run(row: OverrideDefinitions, files: Path, folder: Path) -> list[RunResult]:
    """Run a row whose arguments may name the fixture's files."""
    arguments = [[part.replace("{files}", str(files)) for part in run] for run in row.override_args]
    return run_row(replace(row, override_args=arguments), folder)


@pytest.fixture(scope="module")
def reference(files: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """One process without torchrun, one micro-batch of the whole batch, validated and saved."""
    row = OverrideDefinitions(
        [options("--validation.enable", "--checkpoint.enable", training__local_batch_size=4)],
        "One process", "reference", ngpu=1,
    )  # fmt: skip
    return run(row, files, tmp_path_factory.mktemp("reference"))[0]


def test_the_reference_learns(reference: RunResult) -> None:
    """Else equal losses would mean little."""
    assert losses(reference.metrics)[-1] < losses(reference.metrics)[0] - 0.3
    assert "torch.distributed.run" not in reference.stdout
    assert not (reference.dump_folder / "torchrun").exists()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.test_name)
def test_features(row: Feature, files: Path, reference: RunResult, tmp_path: Path) -> None:
    last = run(row, files, tmp_path)[-1]
    if row.rtol is None:
        return
    for key in DATA_KEYS:
        assert [r[key] for r in last.metrics] == [r[key] for r in reference.metrics], key
    assert losses(last.metrics) == pytest.approx(losses(reference.metrics), rel=row.rtol)
    norms = [[r["grad_norm"] for r in rows] for rows in (last.metrics, reference.metrics)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * row.rtol)  # a norm has fewer digits in common than a mean
