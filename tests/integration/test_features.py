"""What an option promises, seen from outside: rows of runs of the whole trainer, each asserting on losses and files.

The run that all others are compared with is started as run_train.sh starts one rank, the one that shows what a person sees
by torchrun; the ranks of the others are forked.
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


LOG_STEPS = (1, 2, 4, 6)  # of metrics.log_freq = 2
# What a person who watches reads, in this order.
LIFE_OF_A_RUN = (
    r"Starting job: Llama 3 debug model on Shakespeare",
    r"Building 1-D device mesh with \['dp_shard'\], \[2\]",
    r"Checkpoint start: scratch at step 0: checkpoint.enable is false",
    r"Seed: 42",
    r"\[GC\] Initial GC collection [\d.]+ seconds",
    r"training text .* samples of 32 tokens per epoch",
    r"Building llama3 debugmodel with LlamaArgs\(dim=32",
    r"Model llama3 debugmodel size: [\d,]+ total parameters",
    r"Applied full activation checkpointing to the model",
    r"Applied FSDP to the model",
    r"Mixed precision training is handled by fully_shard",
    r"CPU capacity: .* with [\d.]+GiB memory",
    r"Peak FLOPS used for computing MFU: n/a",
    r"Initial weights from seed 42, hash [\da-f]{16} on any topology",
    r"Trainer is initialized with local batch size 2, global batch size 4 .*, gradient accumulation steps 1, "
    r"sequence length 32 .*, total steps 6 \(warmup 2\)",
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
    """A row whose runs read the reference run's data and have its losses and gradient norms within ``rtol``."""

    rtol: float | None = None


def options(*flags: str, **values: object) -> list[str]:
    """Arguments of one run: ``flags`` as they are; a key's dots are written as two underscores."""
    chosen = {**TINY, **{key.replace("__", "."): value for key, value in values.items()}}
    return [part for key, value in chosen.items() for part in (f"--{key}", str(value))] + list(flags)


def losses(rows: Iterable[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def saved_steps(run: RunResult) -> dict[str, str]:
    """Name and kind of every published checkpoint that is left, oldest first."""
    return {step.path.name: step.manifest["kind"] for step in published_steps(run.dump_folder / "checkpoint")}


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


def expect_all_ranks_on_the_board(runs: list[RunResult]) -> None:
    (run,) = runs
    files = list((run.dump_folder / "tb").glob("**/events.out.tfevents.*"))
    boards = [scalars(file.parent) for file in files]
    assert sorted(file.parent.parent.name == "rank_1" for file in files) == [False, True], files
    assert boards[0]["loss_metrics/global_avg_loss"] == boards[1]["loss_metrics/global_avg_loss"]
    assert "gradient accumulation steps 2" in run.stdout


def expect_retention_and_extension(runs: list[RunResult]) -> None:
    """After a last save of weights only, the run continues from the last full one, and no step is repeated in the rows."""
    first, extended, again = runs
    saves = [row for row in read_rows(first.dump_folder / "events.jsonl") if row["event"] == "save"]
    assert [[(row["step"], row["form"]) for row in saves if row["attempt"] == n] for n in (1, 2)] == [
        [(1, "full"), (2, "full"), (4, "full"), (6, "weights")],
        [(6, "full"), (8, "weights")],
    ]
    assert saved_steps(extended) == {"step-6": "full", "step-8": "weights"}, "the two newest"
    assert f"resume from {first.dump_folder}/checkpoint/step-4 at step 4" in extended.stdout
    assert [row["step"] for row in extended.metrics] == list(range(1, 9))
    assert losses(extended.metrics)[:STEPS] == losses(first.metrics)
    superseded = list((first.dump_folder / "checkpoint").glob("*.superseded-*"))
    assert not superseded, "step 6 of weights alone has expired: two steps from 6 on are complete"
    assert "Nothing to do: step 8 of 8 is done already" in again.stdout


def expect_bfloat16(runs: list[RunResult]) -> None:
    assert "parameters float32, compute bfloat16, reduction float32" in runs[0].stdout


def expect_compiled_blocks_and_a_saved_config(runs: list[RunResult]) -> None:
    (run,) = runs
    assert "Compiling each block with torch.compile (aot_eager)" in run.stdout
    printed = run.stdout[run.stdout.index("[job]") : run.stdout.index("[titan]", run.stdout.index("[job]"))]
    assert parse_toml(printed) == parse_toml((run.dump_folder / "config.toml").read_text())
    saved = json.loads((run.dump_folder / "resolved/config.json").read_text())
    assert saved["training"]["steps"] == STEPS and saved["compile"]["backend"] == "aot_eager"


def expect_parts_left_out(runs: list[RunResult]) -> None:
    """Without the saved data position, the text restarts and the weights continue."""
    first, second = runs
    assert [row["step"] for row in second.metrics] == [1, 2, 3, 4]
    assert second.metrics[3]["data_digest"] == first.metrics[0]["data_digest"]
    assert second.metrics[3]["loss"] < first.metrics[0]["loss"] - 0.1
    assert "(not loaded: dataloader, lr_scheduler)" in second.stdout
    assert "learning-rate schedule has changed" not in second.stdout, "the saved one was not looked at"


def expect_the_tiktoken_file(runs: list[RunResult]) -> None:
    assets = [
        parse_toml((runs[-1].dump_folder / f"attempts/{n}/config.toml").read_text())["model"]["hf_assets_path"]
        for n in (1, 2, 3)
    ]
    assert assets[2].endswith("tests/assets/tokenizer/tokenizer.model") and assets[0] == assets[1] != assets[2]


def expect_an_end_with_the_data(runs: list[RunResult]) -> None:
    """The last, partial batch is trained on; the end is a good one, and more epochs extend it."""
    ended, extended = runs
    last = ended.metrics[-1]
    assert ended.exit == {"reason": "done", "code": 0, "step": last["step"]}
    num_tokens = int(re.search(r"training text text .* ([\d,]+) tokens =", ended.stdout)[1].replace(",", ""))
    counts = [row["num_valid_tokens"] for row in ended.metrics]
    assert sum(counts) == num_tokens - 1, "every token but the first was a label once"
    num_samples = -(-(num_tokens - 1) // SEQ_LEN)
    assert num_samples % 8 and len(counts) == -(-num_samples // 8) < 20
    assert counts[-1] <= num_samples % 8 * SEQ_LEN
    end = extended.metrics[-1]["step"]
    assert saved_steps(extended) == {f"step-{step}": "full" for step in (last["step"], end)}
    assert extended.exit == {"reason": "done", "code": 0, "step": end}
    assert extended.metrics[: last["step"]] == ended.metrics
    assert sum(row["num_valid_tokens"] for row in extended.metrics) == 2 * (num_tokens - 1)


DEFAULT = Feature(
    [options("--profiling.enable_profiling", "--validation.enable", "--metrics.enable_tensorboard",
             profiling__profile_freq=3, profiling__profiler_warmup=1, metrics__log_freq=2,
             activation_checkpoint__mode="full")],
    "Two ranks are one rank; profiling, TensorBoard, validation",
    "default",
)  # fmt: skip
ROWS = [
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
        expect=expect_bfloat16,
        rtol=5e-3,
    ),
    Feature(
        [options("--compile.enable", "--compile.backend", "aot_eager", "--job.print_config",
                 optimizer__implementation="foreach", job__save_config_file="resolved/config.json")],
        "Compiled blocks and loss, and another implementation of AdamW; the config is printed and saved",
        "compile_and_foreach",
        ngpu=1,
        expect=expect_compiled_blocks_and_a_saved_config,
        rtol=1e-5,
    ),
    Feature(
        [options("--checkpoint.enable", *extra, checkpoint__interval=2, checkpoint__keep_latest_k=2,
                 checkpoint__last_save_model_only="true", training__steps=steps)
         for steps, extra in ((STEPS, ["--checkpoint.enable_first_step_checkpoint"]), (STEPS + 2, []), (STEPS + 2, []))],
        "First-step save, retention, and going on after a last save of weights alone; then there is nothing to do",
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
        [options(*extra, training__steps=2, training__local_batch_size=4, training__dataset_path="{files}/" + text)
         for text, extra in (("folder", []), ("text.parquet", []), (
             "text.jsonl", ["--model.hf_assets_path", "tests/assets/tokenizer/tokenizer.model"]))],
        "The text of the jsonl file as text files, as parquet, and through the tiktoken file",
        "text_formats",
        ngpu=1,
        expect=expect_the_tiktoken_file,
        rtol=0.0,
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


def run(row: OverrideDefinitions, files: Path, folder: Path, start: ForkedTrainer | None = None) -> list[RunResult]:
    """Run a row whose arguments may name the fixture's files; ``start``: see `run_row`."""
    arguments = [[part.replace("{files}", str(files)) for part in run] for run in row.override_args]
    return run_row(replace(row, override_args=arguments), folder, start)


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
    assert losses(reference.metrics)[-1] < losses(reference.metrics)[0] - 0.2
    assert "torchtitan_like.torchrun" not in reference.stdout
    assert not (reference.dump_folder / "torchrun").exists()


@pytest.fixture(scope="module")
def default(files: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(DEFAULT, files, tmp_path_factory.mktemp("default"))[0]


def test_no_warning_of_python_is_in_the_log(default: RunResult) -> None:
    """torch's deprecations are such warnings: a new release may bring one."""
    warned = re.findall(r".*\.py:\d+: \w*Warning: .*|.*Warning: .*deprecated.*", default.stdout)
    assert warned == []


# "[rank0]:[titan] 2026-03-01 12:00:00,123 - root - INFO - text"
INFO_LINE = re.compile(r"\[rank\d\]:\[titan\] [\d-]+ [\d:,]+ - root - INFO - ")


def test_loading_and_exporting_hugging_face_weights_logs_nothing_but_facts(
    files: Path, reference: RunResult, tmp_path: Path
) -> None:
    """No warning of torch's or of ours, and nothing printed, on either rank."""
    weights = tmp_path / "weights"
    assert titan(["ckpt", "export", str(reference.dump_folder / f"checkpoint/step-{STEPS}"), str(weights)]) == 0
    row = OverrideDefinitions(
        [options("--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf",
                 "--checkpoint.last_save_model_only", "true", checkpoint__initial_load_path=weights,
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
    expect_the_same_losses(default, reference, rtol=1e-5)
    assert default.exit == {"reason": "done", "code": 0, "step": STEPS}


def test_every_rank_leaves_a_trace_of_each_cycle(default: RunResult) -> None:
    traces = default.dump_folder / "profile_traces"
    found = {path.relative_to(traces).as_posix() for path in traces.glob("**/*.json")}
    assert found == {f"iteration_{step}/rank{rank}_trace.json" for step in (3, 6) for rank in (0, 1)}
    for trace in found:
        assert json.loads((traces / trace).read_text())["traceEvents"]


def test_the_keys_of_metrics_jsonl(default: RunResult) -> None:
    """As docs/reference/metrics.md lists them; without a known peak there are no mfu and hfu."""
    for row in default.metrics:
        assert row.keys() == EXACT_KEYS | MEASURED_KEYS | (LOG_STEP_KEYS if row["step"] in LOG_STEPS else set())


def test_tensorboard_shows_the_log_steps(default: RunResult) -> None:
    """One folder, of rank 0, with the names that dashboards know."""
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
    assert tags.pop("validation_metrics/loss") == [(row["step"], pytest.approx(row["loss"])) for row in validation]
    memory = {"memory/rss(GiB)", "memory/rss(%)"}
    assert tags.keys() == memory | {
        f"validation_metrics/{tag}" for tag in (*memory, "bits_per_byte", "throughput(tps)")
    }


def test_the_step_line(default: RunResult) -> None:
    lines = [line for line in logged(default) if line.startswith("step:")]
    pattern = (
        r"step: +(\d+)  loss: +([\d.]+)  grad_norm: +([\d.]+)  memory: +[\d.]+GiB\([\d.]+%\)  tps: [\d,]+  "
        r"tflops: [\d.,]+  mfu: n/a  ([\d.]+)% eta \d+:\d\d:\d\d"
    )
    shown = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert shown == [
        (str(row["step"]), f"{row['loss']:.4f}", f"{row['grad_norm']:.4f}", f"{100 * row['step'] / STEPS:.1f}")
        for row in default.metrics
        if row["step"] in LOG_STEPS
    ], lines


def test_start_and_end_are_logged_in_order(default: RunResult) -> None:
    lines = iter([line for line in default.stdout.splitlines() if line.startswith("[rank0]:[titan] ")])
    for pattern in LIFE_OF_A_RUN:
        assert any(re.search(pattern, line) for line in lines), f"no {pattern!r} after the one before it"


def test_tokenizer_and_memory_of_the_model_are_logged(default: RunResult) -> None:
    assert re.search(r"tokenizer.*2,048 tokens, BOS \d+, EOS \d+", default.stdout)
    assert re.search(r"memory.* for model", default.stdout)


def test_the_run_folder_explains_itself(default: RunResult) -> None:
    """Every name that docs/reference/run_directory.md lists for a run without checkpoints."""
    assert {path.name for path in default.dump_folder.iterdir()} == {
        "config.toml", "metrics.jsonl", "validation.jsonl", "events.jsonl", "exit.json", "attempts", "torchrun", "tb",
        "profile_traces",
    }  # fmt: skip
    attempt = default.dump_folder / "attempts/1"
    assert {path.name for path in attempt.iterdir()} == {"config.toml", "environment", "heartbeat", "logs"}
    assert {path.name for path in (attempt / "logs").iterdir()} == {"rank0.log", "rank1.log"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.test_name)
def test_features(row: Feature, files: Path, reference: RunResult, run_forked: ForkedTrainer, tmp_path: Path) -> None:
    for result in run(row, files, tmp_path, run_forked):
        if row.rtol is not None:
            expect_the_same_losses(result, reference, row.rtol)


def expect_the_same_losses(result: RunResult, reference: RunResult, rtol: float) -> None:
    """The rows of the reference run as far as ``result`` goes; and if it has validated, the same values."""
    rows, wanted = result.metrics, reference.metrics[: len(result.metrics)]
    for key in DATA_KEYS:
        assert [row[key] for row in rows] == [row[key] for row in wanted], key
    assert losses(rows) == pytest.approx(losses(wanted), rel=rtol)
    # A wide tolerance is for what rounds differently, and then that shows.
    assert rtol <= 1e-5 or losses(rows) != pytest.approx(losses(wanted), rel=1e-5)
    norms = [[row["grad_norm"] for row in some] for some in (rows, wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * rtol)  # a norm has fewer digits in common than a mean
    validation, expected = (read_rows(r.dump_folder / "validation.jsonl") for r in (result, reference))
    if validation:
        assert [row["step"] for row in validation] == [1, 3, 6], "each freq steps, and after the first"
        assert losses(validation) == pytest.approx(losses(expected), rel=rtol)
        assert [row["num_tokens"] for row in validation] == [row["num_tokens"] for row in expected]


def test_a_warm_start_loads_only_the_weights(
    files: Path, reference: RunResult, run_forked: ForkedTrainer, tmp_path: Path
) -> None:
    """Weights of another run; step, schedule, optimizer and data are those of a new one."""
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
    """By hand: every document between BOS and EOS, end to end, each token but the first predicted once."""
    from torchtitan_like.config import load_config
    from torchtitan_like.data.text.tokenizer import load_tokenizer
    from torchtitan_like.generate import load_model

    step_folder = reference.dump_folder / "checkpoint" / f"step-{STEPS}"
    model = load_model(step_folder, load_config(["--job.config_file", str(step_folder / "config.toml")]), CPU)
    tokenizer = load_tokenizer(ROOT / "tests/assets/tokenizer")
    lines = (files / "held_out.jsonl").read_text().splitlines()
    tokens = [t for line in lines
              for t in (tokenizer.bos_id, *tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_id)]  # fmt: skip
    assert (len(tokens) - 1) % (2 * SEQ_LEN), "the last batch is to be a partial one"
    total = 0.0
    for begin in range(0, len(tokens) - 1, SEQ_LEN):
        piece = torch.tensor(tokens[begin : begin + SEQ_LEN + 1])
        with torch.no_grad():
            total += cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="sum").item()
    row = read_rows(reference.dump_folder / "validation.jsonl")[-1]
    assert (row["step"], row["num_tokens"]) == (STEPS, len(tokens) - 1)
    assert row["loss"] == pytest.approx(total / (len(tokens) - 1), rel=1e-6)
