"""Mixtures: all layouts and restarts read the same samples, and `data show` prints them."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT
from torchtitan_like.cli import main as titan
from torchtitan_like.config import JobConfig
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.util.jsonl import read_rows

STEPS = 6
SIZES = {"plays": 120, "verse": 90, "prose": 60}
WORDS = {"plays": "hamlet", "verse": "sonnet", "prose": "letters"}
LAYOUTS = {  # name: (ranks, local batch, the degree set to 2); the global batch has 8 samples
    "one": (1, 8, None),
    "accumulated": (1, 2, None),
    "fsdp-2": (2, 2, None),
    "fsdp-4": (4, 2, None),
    "tp-2": (2, 4, "tensor"),
    "cp-2": (2, 8, "context"),
    "pp-2": (2, 8, "pipeline"),
}
NIGHTLY = ("accumulated", "fsdp-2", "fsdp-4", "tp-2", "pp-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, size in SIZES.items():
        lines = [
            json.dumps({"text": f"{WORDS[name]} {number} " * 4}) + "\n" for number in range(size)
        ]
        (root / f"{name}.jsonl").write_text("".join(lines))
    return root


def arguments(folder, run, local_batch, **overrides):
    sources = {f"data.sources.{name}.path": folder / f"{name}.jsonl" for name in SIZES}
    weights = {
        f"data.sources.{name}.weight": weight for name, weight in zip(SIZES, (5, 3, 2), strict=True)
    }
    held_out = {
        f"validation.sources.{name}.path": folder / f"{name}.jsonl" for name in ("plays", "verse")
    }
    validation = {
        "validation.enable": "true",
        "validation.freq": 3,
        "validation.steps": -1,
        "validation.seq_len": 32,
    }
    settings = {
        **sources, **weights, **held_out, **validation,
        "training.local_batch_size": local_batch,
        "training.steps": STEPS,
        "checkpoint.enable": "true",
        "checkpoint.interval": 2,
        "checkpoint.last_save_model_only": "false",
        **overrides,
    }  # fmt: skip
    argv = options(str(folder / run), "float32", **settings)
    index = argv.index("--training.dataset_path")
    return argv[:index] + argv[index + 2 :]


def train(argv):
    """Return the tokens that this rank trained on, step by step."""
    trainer = build(argv)
    batches, original = [], trainer.train_step

    def train_step(step, fetched, agreement):
        batches.append(fetched.batch.tokens.flatten(0, 1).tolist())
        return original(step, fetched, agreement)

    trainer.train_step = train_step
    trainer.train()
    release(trainer)
    return batches


def losses_by_source(folder, run):
    """Yield for each step: loss, token mean of the source losses, source losses, label counts."""
    for row in read_rows(folder / run / "metrics.jsonl"):
        sources = row["sources"]
        counts = [sources[name]["num_valid_tokens"] for name in SIZES]
        losses = [sources[name]["loss"] for name in SIZES]
        assert sum(counts) == row["num_valid_tokens"]
        mean = sum((loss or 0) * count for loss, count in zip(losses, counts, strict=True)) / sum(
            counts
        )
        yield row["loss"], mean, losses, counts


def digests(folder, run):
    return [row["data_digest_chain"] for row in read_rows(folder / run / "metrics.jsonl")]


def validation_rows(folder, run):
    return [
        (row["step"], row["set"], row["loss"], row)
        for row in read_rows(folder / run / "validation.jsonl")
    ]


@pytest.fixture(scope="module")
def reference(folder):
    (batches,) = run_ranks(train, 1, arguments(folder, "one", 8))
    return batches


def test_validation_reports_each_source(folder, reference):
    losses = validation_rows(folder, "one")
    assert [row[:2] for row in losses] == [
        (step, name) for step in (1, 3, 6) for name in ("plays", "verse")
    ]
    for _, name, loss, row in losses:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        num_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
        # Each document ends with a token that has no bytes; its loss does not count.
        all_nats = loss * row["num_tokens"] / math.log(2) / num_bytes
        assert 0.9 * all_nats < row["bits_per_byte"] < 0.999 * all_nats


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in LAYOUTS
        if name != "one"
    ],
)
def test_every_layout_trains_and_validates_on_the_same_samples(folder, reference, name):
    ranks, local_batch, degree = LAYOUTS[name]
    changes = {f"parallelism.{degree}_parallel_degree": 2} if degree else {}
    changes["checkpoint.enable"] = "false"
    batches = run_ranks(train, ranks, arguments(folder, name, local_batch, **changes))
    batches = batches[:1] if degree else batches  # both ranks read the same samples
    for step, whole in enumerate(reference):
        assert sorted(row for rank in batches for row in rank[step]) == sorted(whole)
    for actual, expected in zip(
        losses_by_source(folder, name), losses_by_source(folder, "one"), strict=True
    ):
        assert actual[3] == expected[3]
        assert actual[2] == pytest.approx(expected[2], rel=1e-5)
    assert digests(folder, name) == digests(folder, "one")
    for actual, expected in zip(
        validation_rows(folder, name), validation_rows(folder, "one"), strict=True
    ):
        assert actual[:2] == expected[:2] and actual[2] == pytest.approx(expected[2], rel=1e-5)
        assert actual[3]["bits_per_byte"] == pytest.approx(expected[3]["bits_per_byte"], rel=1e-5)


def test_loss_is_the_token_mean_of_source_losses(folder, reference):
    rows = list(losses_by_source(folder, "one"))
    assert len(rows) == STEPS
    for loss, mean, losses, _ in rows:
        assert loss == pytest.approx(mean, rel=1e-6)
        assert len(set(losses)) == len(SIZES)


def test_restart_on_another_layout_continues_the_data(folder, reference):
    """The run restarts after steps 2 and 4."""
    batches = []
    for (ranks, local_batch), steps in zip([(2, 2), (4, 1), (1, 4)], (2, 4, STEPS), strict=True):
        argv = arguments(
            folder,
            "restarted",
            local_batch,
            **{"training.steps": steps, "lr_scheduler.total_steps": STEPS},
        )
        by_rank = run_ranks(train, ranks, argv)
        batches += [
            [row for rank in by_rank for row in rank[step]] for step in range(len(by_rank[0]))
        ]
    assert [sorted(rows) for rows in batches] == [sorted(rows) for rows in reference]
    assert digests(folder, "restarted") == digests(folder, "one")


RAMP = {
    "training.batch_ramp": "2,2,12",
    "training.global_batch_size": 8,
    "training.seq_len": 32,
    "validation.enable": "false",
}


def test_batch_ramp_continues_at_the_same_sample(folder):
    """Steps have 2, 2, 4, 6, 8 and 8 samples on any layout, also after a resume within the ramp."""
    runs = {"one": (1, 2, None), "two": (2, 1, None), "stages": (2, 2, "pipeline")}
    for name, (ranks, local_batch, degree) in runs.items():
        parallelism = {f"parallelism.{degree}_parallel_degree": 2} if degree else {}
        run_ranks(
            train, ranks, arguments(folder, f"ramp-{name}", local_batch, **RAMP, **parallelism)
        )
    for (ranks, local_batch), steps in zip([(2, 1), (1, 1)], (4, STEPS), strict=True):
        stopped = {"training.steps": steps, "lr_scheduler.total_steps": STEPS}
        run_ranks(train, ranks, arguments(folder, "ramp-resumed", local_batch, **RAMP, **stopped))
    one, *others = (
        [*read_rows(folder / f"ramp-{name}" / "metrics.jsonl")] for name in (*runs, "resumed")
    )
    assert [row["n_tokens_seen"] for row in one] == [32 * n for n in (2, 4, 8, 14, 22, 30)]
    for rows in others:
        for row, expected in zip(rows, one, strict=True):
            assert [row[key] for key in ("n_tokens_seen", "lr", "data_digest_chain")] == [
                expected[key] for key in ("n_tokens_seen", "lr", "data_digest_chain")
            ]
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def stream_arguments(folder, run, local_batch, **overrides):
    """Return arguments for a mixture with one streaming source."""
    streamed = {
        "data.sources.plays.streaming": "true",
        "data.packing": "best_fit",
        "validation.enable": "false",
    }
    return arguments(folder, run, local_batch, **streamed, **overrides)


@contextmanager
def small_windows():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "BLOCK_BYTES", 200)
        patched.setattr(streaming, "WINDOW_BYTES", 400)
        patched.setattr(streaming, "MIN_SAMPLES", 1)
        yield


def train_in_small_windows(argv):
    with small_windows():
        return train(argv)


def test_a_stream_continues_on_any_layout(folder):
    run_ranks(train_in_small_windows, 1, stream_arguments(folder, "stream", 8))
    for (ranks, local_batch), steps in zip([(2, 2), (4, 2)], (4, STEPS), strict=True):
        later = {"training.steps": steps, "lr_scheduler.total_steps": STEPS}
        run_ranks(
            train_in_small_windows,
            ranks,
            stream_arguments(folder, "stream-again", local_batch, **later),
        )
    assert digests(folder, "stream-again") == digests(folder, "stream")
    manifest = json.loads((folder / "stream-again/checkpoint/step-6/manifest.json").read_text())
    assert manifest["data"]["cursors"]["plays"][0] > 1 and manifest["data"]["counts"]["prose"] > 4


def test_changed_mixture_is_rejected_before_the_model_is_built(folder, reference):
    argv = arguments(folder, "one", 8, **{"data.sources.verse.weight": 4, "training.steps": 9})
    (message,) = run_ranks(build_error, 1, argv)
    assert "sources.verse.weight: saved 3.0, now 4.0" in message and "data.allow_change" in message


def build_error(argv):
    from torchtitan_like import train as module

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "build_model", None)  # a call would raise TypeError
        with pytest.raises(DataError) as refused:
            build(argv)
    return str(refused.value)


def build_error_with_another_copy(argv, key, other):
    """Return the error if rank 1 reads another copy of a dataset."""
    return build_error([*argv, f"--{key}", str(other)] if dist.get_rank() else argv)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("data.sources.plays.path", "sources.plays.num_tokens"),
        ("validation.sources.plays.path", "validation plays"),
    ],
)
def test_ranks_with_different_datasets_exit_before_the_model_is_built(folder, key, name):
    other = folder / "stale" / "plays.jsonl"
    other.parent.mkdir(exist_ok=True)
    other.write_text(
        (folder / "plays.jsonl").read_text().replace("hamlet 7 ", "hamlet and macbeth ")
    )
    first, second = run_ranks(
        build_error_with_another_copy, 2, arguments(folder, "copies", 4), key, other
    )
    assert first == second and f"ranks read different datasets: {name} is " in first


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_data_show_prints_any_step_from_one_checkpoint(
    folder, reference, step, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    saved = folder / "one/checkpoint/step-4"
    assert titan(["data", "show", str(saved), "--step", str(step), "--whole"]) == 0
    output = capsys.readouterr().out
    assert "metrics.jsonl of the run: " in output and "the same" in output
    assert output.count(" epoch 0 sample ") == 8
    tokenizer = load_tokenizer(JobConfig().model.tokenizer_folder)
    for row in reference[step - 1]:
        assert tokenizer.decode(row) in output


def test_data_show_prints_json(folder, reference, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    saved = folder / "one/checkpoint/step-4"
    assert titan(["data", "show", str(saved), "--step", "5", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["step"] == 5 and content["num_samples"] == 8
    assert content["digest"] == content["recorded_digest"]
    assert [sample["position"] for sample in content["samples"]] == list(range(32, 40))
    tokenizer = load_tokenizer(JobConfig().model.tokenizer_folder)
    texts = [sample["text"] for sample in content["samples"]]
    assert sorted(texts) == sorted(map(tokenizer.decode, reference[4]))
    assert {sample["source"] for sample in content["samples"]} <= SIZES.keys()


def test_data_show_leaves_the_windows_of_a_stream_unchanged(folder, capsys, monkeypatch):
    """`data show` may run while a training run reads the same windows."""
    run_ranks(train_in_small_windows, 1, stream_arguments(folder, "shown", 8))
    monkeypatch.chdir(ROOT)

    def windows():
        return {path: path.stat().st_mtime_ns for path in folder.glob("tokens/window-*")}

    before = windows()
    with small_windows():
        assert titan(["data", "show", str(folder / "shown/checkpoint/step-2"), "--step", "5"]) == 0
    assert "the same" in capsys.readouterr().out
    assert before and windows() == before


def test_data_show_reports_a_changed_dataset(folder, reference, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    other = folder / "other.jsonl"
    other.write_text((folder / "plays.jsonl").read_text().replace("hamlet", "macbeth"))
    saved = str(folder / "one/checkpoint/step-4")
    assert (
        titan(["data", "show", saved, "--step", "5", "--data.sources.plays.path", str(other)]) == 2
    )
    assert "sources.plays.text: saved" in capsys.readouterr().err
