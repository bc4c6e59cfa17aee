"""Options of the whole trainer: a table of runs with checks of their losses and files.

The reference run starts one rank like run_train.sh, the default run uses torchrun. Other runs have
forked ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.distributed.parity import short_documents
from tests.harness.runner import ROOT, OverrideDefinitions, RunResult, run_row
from tests.integration.forked import ForkedTrainer
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.cli import main as titan
from torchtitan_like.config.layers import parse_toml
from torchtitan_like.util.jsonl import read_rows

CPU = torch.device("cpu")
STEPS = 6
SEQ_LEN = 32
# A tiny model whose loss falls within a few steps. Gradients are never clipped, because one option
# does not support clipping.
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
# Keys of a metrics row that do not depend on rounding; further keys of all rows and of log steps.
DATA_KEYS = (
    "step",
    "n_tokens_seen",
    "num_valid_tokens",
    "lr",
    "data_digest",
    "data_digest_chain",
    "skipped",
)
EXACT_KEYS = {*DATA_KEYS, "loss", "max_loss", "grad_norm"}
MEASURED_KEYS = {"time", "data_loading_s"}
LOG_STEP_KEYS = {
    "tps",
    "tflops",
    "memory_gib",
    "step_s",
    "mean_data_loading_s",
    "data_loading_percent",
}


LOG_STEPS = (1, 2, 4, 6)  # for metrics.log_freq = 2
# Expected log lines of a run, in this order.
LOG_PATTERNS = (
    r"Starting job: Llama 3 debug model on Shakespeare",
    r"Building 1-D device mesh with \['dp_shard'\], \[2\]",
    r"Checkpoint start: scratch at step 0: checkpoint.enable is false",
    r"Seed: 42",
    r"\[GC\] Initial GC collection [\d.]+ seconds",
    r"training data .* samples of 32 tokens per epoch",
    r"Building llama3 debugmodel with LlamaArgs\(dim=32",
    r"Model llama3 debugmodel size: [\d,]+ total parameters",
    r"Applied full activation checkpointing to the model",
    r"Applied FSDP to the model",
    r"Mixed precision training is handled by fully_shard",
    r"CPU capacity: .* with [\d.]+GiB memory",
    r"Peak FLOPS used for computing MFU: n/a",
    r"Initial weights from seed 42, hash [\da-f]{16} on any topology",
    r"Trainer is initialized with local batch size 2, global batch size 4 .*, "
    r"gradient accumulation steps 1, sequence length 32 .*, total steps 6 \(warmup 2\)",
    r"Training starts at step 1",
    r"Profiling active. Traces will be saved at .*/profile_traces",
    r"step:  1  ",
    r"Synchronizing and adjusting timeout for all ProcessGroups to 0:01:40",
    r"step:  6  ",
    r"Training completed",
    r"Process group destroyed",
)


@dataclass(frozen=True)
class Feature(OverrideDefinitions):
    """A row of the table. With `rtol`, data, losses and gradient norms must equal the reference."""

    rtol: float | None = None


def options(*flags: str, **values: object) -> list[str]:
    """Return the arguments of one run. Two underscores in a keyword replace a dot of the key."""
    settings = {**TINY, **{key.replace("__", "."): value for key, value in values.items()}}
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))] + list(
        flags
    )


def losses(rows: Iterable[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def saved_steps(run: RunResult) -> dict[str, str]:
    """Return name and kind of every published checkpoint, oldest first."""
    return {
        step.path.name: step.manifest["kind"]
        for step in published_steps(run.dump_folder / "checkpoint")
    }


def log_lines(run: RunResult) -> list[str]:
    """Return the log lines of rank 0 in the newest attempt."""
    newest = max((run.dump_folder / "attempts").iterdir(), key=lambda path: int(path.name))
    return [
        line.partition(" - INFO - ")[2] or line
        for line in (newest / "logs/rank0.log").read_text().splitlines()
    ]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard reads from event files: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }


# ---- checks of the rows


def expect_event_files_of_all_ranks(runs: list[RunResult]) -> None:
    (run,) = runs
    files = list((run.dump_folder / "tb").glob("**/events.out.tfevents.*"))
    boards = [scalars(file.parent) for file in files]
    assert sorted(file.parent.parent.name == "rank_1" for file in files) == [False, True], files
    assert boards[0]["loss_metrics/global_avg_loss"] == boards[1]["loss_metrics/global_avg_loss"]
    assert "gradient accumulation steps 2" in run.stdout


def expect_retention_and_extension(runs: list[RunResult]) -> None:
    """After a last model-only checkpoint, the run resumes from the last full one.

    The metrics contain no step twice.
    """
    first, extended, repeated = runs
    saves = [row for row in read_rows(first.dump_folder / "events.jsonl") if row["event"] == "save"]
    assert [
        [(row["step"], row["form"]) for row in saves if row["attempt"] == n] for n in (1, 2)
    ] == [
        [(1, "full"), (2, "full"), (4, "full"), (6, "weights")],
        [(6, "full"), (8, "weights")],
    ]
    assert saved_steps(extended) == {"step-6": "full", "step-8": "weights"}, (
        "expected the two newest"
    )
    assert f"resume from {first.dump_folder}/checkpoint/step-4 at step 4" in extended.stdout
    assert [row["step"] for row in extended.metrics] == list(range(1, 9))
    assert losses(extended.metrics)[:STEPS] == losses(first.metrics)
    superseded = list((first.dump_folder / "checkpoint").glob("*.superseded-*"))
    assert not superseded, "the model-only step 6 must expire after two full steps"
    assert "Nothing to do: step 8 of 8 is done already" in repeated.stdout


def expect_bfloat16(runs: list[RunResult]) -> None:
    assert "parameters float32, compute bfloat16, reduction float32" in runs[0].stdout


def expect_compiled_blocks_and_a_saved_config(runs: list[RunResult]) -> None:
    (run,) = runs
    assert "Compiling each block with torch.compile (aot_eager)" in run.stdout
    printed = run.stdout[
        run.stdout.index("[job]") : run.stdout.index("[titan]", run.stdout.index("[job]"))
    ]
    assert parse_toml(printed) == parse_toml((run.dump_folder / "config.toml").read_text())
    saved = json.loads((run.dump_folder / "resolved/config.json").read_text())
    assert saved["training"]["steps"] == STEPS and saved["compile"]["backend"] == "aot_eager"


def expect_excluded_states(runs: list[RunResult]) -> None:
    """Without the saved data position, the data restart and the weights continue."""
    first, second = runs
    assert [row["step"] for row in second.metrics] == [1, 2, 3, 4]
    assert second.metrics[3]["data_digest"] == first.metrics[0]["data_digest"]
    assert second.metrics[3]["loss"] < first.metrics[0]["loss"] - 0.1
    assert "(not loaded: dataloader, lr_scheduler)" in second.stdout
    assert "learning-rate schedule has changed" not in second.stdout, (
        "the stored schedule must not be read"
    )


def expect_tiktoken_file(runs: list[RunResult]) -> None:
    assets = [
        parse_toml((runs[-1].dump_folder / f"attempts/{n}/config.toml").read_text())["model"][
            "hf_assets_path"
        ]
        for n in (1, 2, 3)
    ]
    assert (
        assets[2].endswith("tests/assets/tokenizer/tokenizer.model")
        and assets[0] == assets[1] != assets[2]
    )


def expect_end_of_data(runs: list[RunResult]) -> None:
    """The run trains on the last, partial batch and ends with "done"; more epochs extend it."""
    first, extended = runs
    last = first.metrics[-1]
    assert first.exit == {"reason": "done", "code": 0, "step": last["step"]}
    num_tokens = int(
        re.search(r"training data text .* ([\d,]+) tokens =", first.stdout)[1].replace(",", "")
    )
    counts = [row["num_valid_tokens"] for row in first.metrics]
    assert sum(counts) == num_tokens - 1, "every token except the first must be a label once"
    num_samples = -(-(num_tokens - 1) // SEQ_LEN)
    assert num_samples % 8 and len(counts) == -(-num_samples // 8) < 20
    assert counts[-1] <= num_samples % 8 * SEQ_LEN
    end = extended.metrics[-1]["step"]
    assert saved_steps(extended) == {f"step-{step}": "full" for step in (last["step"], end)}
    assert extended.exit == {"reason": "done", "code": 0, "step": end}
    assert extended.metrics[: last["step"]] == first.metrics
    assert sum(row["num_valid_tokens"] for row in extended.metrics) == 2 * (num_tokens - 1)


DEFAULT = Feature(
    [options("--profiling.enable_profiling", "--validation.enable", "--metrics.enable_tensorboard",
             profiling__profile_freq=3, profiling__profiler_warmup=1, metrics__log_freq=2,
             validation__reference_curve="tests/assets/reference_curve.csv",
             activation_checkpoint__mode="full")],
    "Two ranks equal one rank; profiling, TensorBoard, validation",
    "default",
)  # fmt: skip
ROWS = [
    Feature(
        [options("--metrics.enable_tensorboard", "--metrics.save_for_all_ranks",
                 training__local_batch_size=1)],
        "Two micro-batches on each rank; every rank writes its own TensorBoard file",
        "gradient_accumulation",
        expect=expect_event_files_of_all_ranks,
        rtol=1e-5,
    ),
    Feature(
        [options("--optimizer.early_step_in_backward")],
        "The optimizer updates each parameter during backward, with the same gradients",
        "optimizer_in_backward",
        rtol=1e-5,
    ),
    Feature(
        [options(training__mixed_precision_param="bfloat16")],
        "Losses in bfloat16 are close to float32",
        "mixed_precision",
        expect=expect_bfloat16,
        rtol=5e-3,
    ),
    Feature(
        [options("--compile.enable", "--compile.backend", "aot_eager", "--job.print_config",
                 optimizer__implementation="foreach",
                          job__save_config_file="resolved/config.json")],
        "Compiled blocks and loss, foreach AdamW; the config is printed and saved",
        "compile_and_foreach",
        ngpu=1,
        expect=expect_compiled_blocks_and_a_saved_config,
        rtol=1e-5,
    ),
    Feature(
        [options("--checkpoint.enable", *extra, checkpoint__interval=2, checkpoint__keep_latest_k=2,
                 checkpoint__last_save_model_only="true", training__steps=steps)
         for steps, extra in ((STEPS, ["--checkpoint.enable_first_step_checkpoint"]),
                               (STEPS + 2, []), (STEPS + 2, []))],
        "First-step checkpoint, retention, and a resume after a last model-only checkpoint",
        "retention_and_extension",
        ngpu=1,
        expect=expect_retention_and_extension,
    ),
    Feature(
        [options("--checkpoint.enable", training__steps=3),
         options("--checkpoint.enable", training__steps=4, lr_scheduler__total_steps=4,
                 checkpoint__exclude_from_loading="dataloader,lr_scheduler")],
        "A resume can exclude data position and schedule",
        "exclude_from_loading",
        ngpu=1,
        expect=expect_excluded_states,
    ),
    Feature(
        [options(*extra, training__steps=2, training__local_batch_size=4,
                 training__dataset_path="{files}/" + text)
         for text, extra in (("folder", []), ("text.parquet", []), (
             "text.jsonl", ["--model.hf_assets_path", "tests/assets/tokenizer/tokenizer.model"]))],
        "The same text as text files, as parquet, and with a tiktoken tokenizer",
        "text_formats",
        ngpu=1,
        expect=expect_tiktoken_file,
        rtol=0.0,
    ),
    Feature(
        [options("--checkpoint.enable", training__steps=20, training__global_batch_size=8,
                 data__sources__text__path="{files}/text.jsonl",
                          data__sources__text__max_epochs=epochs)
         for epochs in (1, 2)],
        "The data end before the last step; a second epoch continues the run",
        "data_ends",
        ngpu=1,
        expect=expect_end_of_data,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 30 short documents as jsonl, text files and parquet, and a validation set."""
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


def run(
    row: OverrideDefinitions, files: Path, folder: Path, start: ForkedTrainer | None = None
) -> list[RunResult]:
    """Run a row, with {files} in its arguments replaced. `start`: see `run_row`."""
    arguments = [[part.replace("{files}", str(files)) for part in run] for run in row.override_args]
    return run_row(replace(row, override_args=arguments), folder, start)


@pytest.fixture(scope="module")
def reference(files: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of one process without torchrun, with one micro-batch, validation and checkpoint."""
    row = OverrideDefinitions(
        [options("--validation.enable", "--checkpoint.enable", training__local_batch_size=4)],
        "One process", "reference", ngpu=1,
    )  # fmt: skip
    return run(row, files, tmp_path_factory.mktemp("reference"))[0]


def test_reference_run_learns(reference: RunResult) -> None:
    """Otherwise equal losses would prove little."""
    assert losses(reference.metrics)[-1] < losses(reference.metrics)[0] - 0.2
    assert "torchtitan_like.torchrun" not in reference.stdout
    assert not (reference.dump_folder / "torchrun").exists()


@pytest.fixture(scope="module")
def default(files: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(DEFAULT, files, tmp_path_factory.mktemp("default"))[0]


def test_log_contains_no_python_warning(default: RunResult) -> None:
    """New releases of torch may add deprecation warnings."""
    warned = re.findall(r".*\.py:\d+: \w*Warning: .*|.*Warning: .*deprecated.*", default.stdout)
    assert warned == []


# "[rank0]:[titan] 2026-03-01 12:00:00,123 - root - INFO - text"
INFO_LINE = re.compile(r"\[rank\d\]:\[titan\] [\d-]+ [\d:,]+ - root - INFO - ")


@pytest.mark.nightly
def test_loading_and_exporting_hf_weights_logs_no_warning(
    files: Path, reference: RunResult, tmp_path: Path
) -> None:
    """All output lines of both ranks are log lines of level INFO."""
    weights = tmp_path / "weights"
    assert (
        titan(
            [
                "ckpt",
                "export",
                str(reference.dump_folder / f"checkpoint/step-{STEPS}"),
                str(weights),
            ]
        )
        == 0
    )
    row = OverrideDefinitions(
        [options("--checkpoint.enable", "--checkpoint.initial_load_in_hf",
                 "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only",
                          "true", checkpoint__initial_load_path=weights,
                 checkpoint__hf_interval=1, training__steps=2,
                 lr_scheduler__warmup_steps=0, lr_scheduler__total_steps=2)],
        "Starts from Hugging Face weights and exports them", "clean_log",
    )  # fmt: skip
    (result,) = run(row, files, tmp_path)
    exported = result.dump_folder.glob("checkpoint/**/model*.safetensors")
    assert {path.parent.name for path in exported} == {"step-1", "step-2"}
    lines = result.stdout.splitlines()
    assert len(lines) > 40
    assert [line for line in lines if not INFO_LINE.match(line)] == []


def test_two_ranks_equal_one(default: RunResult, reference: RunResult) -> None:
    expect_equal_losses(default, reference, rtol=1e-5)
    assert default.exit == {"reason": "done", "code": 0, "step": STEPS}


def test_every_rank_writes_a_trace_of_each_profiler_cycle(default: RunResult) -> None:
    traces = default.dump_folder / "profile_traces"
    files = {path.relative_to(traces).as_posix() for path in traces.glob("**/*.json")}
    assert files == {
        f"iteration_{step}/rank{rank}_trace.json" for step in (3, 6) for rank in (0, 1)
    }
    for trace in files:
        assert json.loads((traces / trace).read_text())["traceEvents"]


PROFILE_LINE = re.compile(
    r"Profile at step (\d+), mean of a step: compute ([\d.]+) ms, "
    r"exposed communication ([\d.]+) ms, data wait ([\d.]+) ms, idle ([\d.]+) ms"
)


def test_each_rank_logs_the_times_of_its_profiles(default: RunResult) -> None:
    for rank in (0, 1):
        log = (default.dump_folder / f"attempts/1/logs/rank{rank}.log").read_text()
        found = PROFILE_LINE.findall(log)
        assert [int(step) for step, *_ in found] == [3, 6]
        for _, compute, exposed, _, idle in found:
            assert min(float(compute), float(exposed), float(idle)) > 0


def test_metrics_jsonl_has_the_documented_keys(default: RunResult) -> None:
    """See docs/reference/metrics.md. CPU ranks have no peak FLOPS, so mfu and hfu are missing."""
    for row in default.metrics:
        assert row.keys() == EXACT_KEYS | MEASURED_KEYS | (
            LOG_STEP_KEYS if row["step"] in LOG_STEPS else set()
        )


def test_tensorboard_contains_the_log_steps(default: RunResult) -> None:
    """Only rank 0 writes events, with TorchTitan's tag names."""
    (folder,) = (default.dump_folder / "tb").iterdir()
    tags = scalars(folder)
    names = {
        "loss_metrics/global_avg_loss": "loss",
        "loss_metrics/global_max_loss": "max_loss",
        "grad_norm": "grad_norm",
        "lr": "lr",
        "n_tokens_seen": "n_tokens_seen",
        "throughput(tps)": "tps",
        "tflops": "tflops",
        "time_metrics/end_to_end(s)": "step_s",
        "time_metrics/data_loading(s)": "mean_data_loading_s",
        "time_metrics/data_loading(%)": "data_loading_percent",
    }
    log_steps = [row for row in default.metrics if row["step"] in LOG_STEPS]
    for tag, key in names.items():
        assert tags.pop(tag) == [(row["step"], pytest.approx(row[key])) for row in log_steps], tag
    validation = read_rows(default.dump_folder / "validation.jsonl")
    assert tags.pop("validation_metrics/loss") == [
        (row["step"], pytest.approx(row["loss"])) for row in validation
    ]
    memory = {"memory/rss(GiB)", "memory/rss(%)"}
    assert tags.keys() == memory | {
        f"validation_metrics/{tag}" for tag in (*memory, "bits_per_byte", "throughput(tps)")
    }


def test_step_log_line_contains_the_metrics(default: RunResult) -> None:
    lines = [line for line in log_lines(default) if line.startswith("step:")]
    pattern = (
        r"step: +(\d+)  loss: +([\d.]+)  grad_norm: +([\d.]+)  "
        r"memory: +[\d.]+GiB\([\d.]+%\)  tps: [\d,]+  "
        r"tflops: [\d.,]+  mfu: n/a  ([\d.]+)% eta \d+:\d\d:\d\d"
    )
    values = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert values == [
        (
            str(row["step"]),
            f"{row['loss']:.4f}",
            f"{row['grad_norm']:.4f}",
            f"{100 * row['step'] / STEPS:.1f}",
        )
        for row in default.metrics
        if row["step"] in LOG_STEPS
    ], lines


def test_rank_0_compares_each_validation_with_the_reference_curve(default: RunResult) -> None:
    """The validation after step 6 is beyond the curve, which ends at step 5."""
    rows = read_rows(default.dump_folder / "validation.jsonl")
    expected = [
        f"{rows[0]['bits_per_byte']:.2f} bits/byte at step 1; recipe: 6.00",
        f"{rows[1]['bits_per_byte']:.2f} bits/byte at step 3; recipe: 5.60 (5.50 to 5.70, 2 seeds)",
    ]
    lines = log_lines(default)
    assert [line for line in lines if "recipe" in line] == expected
    assert lines[lines.index(expected[0]) - 1].startswith("validate step:  1")
    assert default.stdout.count("; recipe: ") == len(expected)


def test_start_and_end_are_logged_in_order(default: RunResult) -> None:
    lines = iter(
        [line for line in default.stdout.splitlines() if line.startswith("[rank0]:[titan] ")]
    )
    for pattern in LOG_PATTERNS:
        assert any(re.search(pattern, line) for line in lines), (
            f"{pattern!r} is missing after the previous line"
        )


def test_tokenizer_and_model_memory_are_logged(default: RunResult) -> None:
    assert re.search(r"tokenizer.*2,048 tokens, BOS \d+, EOS \d+", default.stdout)
    assert re.search(r"memory.* for model", default.stdout)


def test_run_folder_has_the_documented_files(default: RunResult) -> None:
    """See docs/reference/run_directory.md for the files of a run without checkpoints."""
    assert {path.name for path in default.dump_folder.iterdir()} == {
        "config.toml", "metrics.jsonl", "validation.jsonl", "events.jsonl", "exit.json",
        "attempts", "torchrun", "tb", "profile_traces",
    }  # fmt: skip
    attempt = default.dump_folder / "attempts/1"
    assert {path.name for path in attempt.iterdir()} == {
        "config.toml",
        "environment",
        "heartbeat",
        "logs",
    }
    assert {path.name for path in (attempt / "logs").iterdir()} == {"rank0.log", "rank1.log"}


# tests/distributed/test_loading.py and tests/unit/data test these features in every run.
NIGHTLY = ("exclude_from_loading", "text_formats")
CELLS = [
    pytest.param(
        row, id=row.test_name, marks=[pytest.mark.nightly] if row.test_name in NIGHTLY else []
    )
    for row in ROWS
]


@pytest.mark.parametrize("row", CELLS)
def test_feature(
    row: Feature, files: Path, reference: RunResult, run_forked: ForkedTrainer, tmp_path: Path
) -> None:
    for result in run(row, files, tmp_path, run_forked):
        if row.rtol is not None:
            expect_equal_losses(result, reference, row.rtol)


def expect_equal_losses(result: RunResult, reference: RunResult, rtol: float) -> None:
    """Compare data, losses, gradient norms and validation losses with the reference run."""
    rows, expected_rows = result.metrics, reference.metrics[: len(result.metrics)]
    for key in DATA_KEYS:
        assert [row[key] for row in rows] == [row[key] for row in expected_rows], key
    assert losses(rows) == pytest.approx(losses(expected_rows), rel=rtol)
    # Runs with a large tolerance round differently, so their losses must differ.
    assert rtol <= 1e-5 or losses(rows) != pytest.approx(losses(expected_rows), rel=1e-5)
    norms = [[row["grad_norm"] for row in table] for table in (rows, expected_rows)]
    # Gradient norms have larger rounding errors than mean losses.
    assert norms[0] == pytest.approx(norms[1], rel=10 * rtol)
    validation, expected = (
        read_rows(r.dump_folder / "validation.jsonl") for r in (result, reference)
    )
    if validation:
        assert [row["step"] for row in validation] == [1, 3, 6], (
            "expected a validation after step 1 and every 3 steps"
        )
        assert losses(validation) == pytest.approx(losses(expected), rel=rtol)
        assert [row["num_tokens"] for row in validation] == [row["num_tokens"] for row in expected]


def test_warm_start_loads_only_the_weights(
    files: Path, reference: RunResult, run_forked: ForkedTrainer, tmp_path: Path
) -> None:
    """Step, schedule, optimizer and data start anew."""
    weights = reference.dump_folder / "checkpoint" / f"step-{STEPS}"
    row = OverrideDefinitions(
        [options("--checkpoint.enable", training__steps=2, checkpoint__initial_load_path=weights)],
        "initial_load_path", "warm_start", ngpu=1,
    )  # fmt: skip
    (warm,) = run(row, files, tmp_path, run_forked)
    assert f"Checkpoint start: warm from {weights} at step 0" in warm.stdout
    for key in DATA_KEYS:
        assert [r[key] for r in warm.metrics] == [r[key] for r in reference.metrics[:2]], key
    assert warm.metrics[0]["loss"] < reference.metrics[0]["loss"] - 0.2
    assert list(saved_steps(warm)) == ["step-2"]


def test_validation_is_the_mean_over_all_tokens(files: Path, reference: RunResult) -> None:
    """Compute the loss directly, from documents with BOS and EOS."""
    from torchtitan_like.build import identify
    from torchtitan_like.config import load_config
    from torchtitan_like.data.text.tokenizer import load_tokenizer
    from torchtitan_like.inference.load_model import load_model

    step_folder = reference.dump_folder / "checkpoint" / f"step-{STEPS}"
    config = load_config(["--job.config_file", str(step_folder / "config.toml")])
    model = load_model(step_folder, identify(config.model), "float32")
    tokenizer = load_tokenizer(ROOT / "tests/assets/tokenizer")
    lines = (files / "held_out.jsonl").read_text().splitlines()
    tokens = [
        token
        for line in lines
        for token in (
            tokenizer.bos_id,
            *tokenizer.encode(json.loads(line)["text"]),
            tokenizer.eos_id,
        )
    ]
    assert (len(tokens) - 1) % (2 * SEQ_LEN), "the last batch must be partial"
    total = 0.0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        piece = torch.tensor(tokens[start : start + SEQ_LEN + 1])
        with torch.no_grad():
            total += cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="sum").item()
    row = read_rows(reference.dump_folder / "validation.jsonl")[-1]
    assert (row["step"], row["num_tokens"]) == (STEPS, len(tokens) - 1)
    assert row["loss"] == pytest.approx(total / (len(tokens) - 1), rel=1e-6)
