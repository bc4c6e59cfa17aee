"""A mixture through the whole trainer: the same samples and losses on any layout, stopped or not, and shown again."""

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
from torchtitan_like.data.errors import DataError
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.util.jsonl import read_rows

STEPS = 6
SIZES = {"plays": 120, "verse": 90, "prose": 60}
WORDS = {"plays": "hamlet", "verse": "sonnet", "prose": "letters"}
LAYOUTS = {  # name: (ranks, local batch, degree that is 2); the global batch is 8 samples
    "one": (1, 8, None),
    "accumulated": (1, 2, None),
    "fsdp-2": (2, 2, None),
    "fsdp-4": (4, 2, None),
    "tp-2": (2, 4, "tensor"),
    "cp-2": (2, 8, "context"),
    "pp-2": (2, 8, "pipeline"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, size in SIZES.items():
        lines = [json.dumps({"text": f"{WORDS[name]} {number} " * 4}) + "\n" for number in range(size)]
        (root / f"{name}.jsonl").write_text("".join(lines))
    return root


def arguments(folder, run, local_batch, **overrides):
    sources = {f"data.sources.{name}.path": folder / f"{name}.jsonl" for name in SIZES}
    weights = {f"data.sources.{name}.weight": weight for name, weight in zip(SIZES, (5, 3, 2), strict=True)}
    held_out = {f"validation.sources.{name}.path": folder / f"{name}.jsonl" for name in ("plays", "verse")}
    validation = {"validation.enable": "true", "validation.freq": 3, "validation.steps": -1, "validation.seq_len": 32}
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
    at = argv.index("--training.dataset_path")
    return argv[:at] + argv[at + 2 :]


def train(argv):
    """The tokens that this rank was fed, step by step."""
    trainer = build(argv)
    fed, given = [], trainer.train_step

    def train_step(step, fetched, agreement):
        fed.append(fetched.batch.tokens.flatten(0, 1).tolist())
        return given(step, fetched, agreement)

    trainer.train_step = train_step
    trainer.train()
    release(trainer)
    return fed


def losses_by_source(folder, run):
    """Of each step: the loss, its mean over the sources, and the loss and labels of each."""
    for row in read_rows(folder / run / "metrics.jsonl"):
        found = row["sources"]
        counts = [found[name]["num_valid_tokens"] for name in SIZES]
        losses = [found[name]["loss"] for name in SIZES]
        assert sum(counts) == row["num_valid_tokens"]
        mean = sum((loss or 0) * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        yield row["loss"], mean, losses, counts


def digests(folder, run):
    return [row["data_digest_chain"] for row in read_rows(folder / run / "metrics.jsonl")]


def validated(folder, run):
    return [(row["step"], row["set"], row["loss"], row) for row in read_rows(folder / run / "validation.jsonl")]


@pytest.fixture(scope="module")
def reference(folder):
    (fed,) = run_ranks(train, 1, arguments(folder, "one", 8))
    return fed


def test_every_layout_feeds_the_same_samples_and_validates_the_same(folder, reference):
    expected, losses = digests(folder, "one"), validated(folder, "one")
    assert [row[:2] for row in losses] == [(step, name) for step in (1, 3, 6) for name in ("plays", "verse")]
    for _, name, loss, row in losses:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        num_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
        assert row["bits_per_byte"] == pytest.approx(loss * row["num_tokens"] / math.log(2) / num_bytes, rel=1e-12)
    for name, (ranks, local_batch, degree) in list(LAYOUTS.items())[1:]:
        cut = {f"parallelism.{degree}_parallel_degree": 2} if degree else {}
        fed = run_ranks(train, ranks, arguments(folder, name, local_batch, **cut))
        fed = fed[:1] if degree else fed  # both ranks are fed the same
        for step, whole in enumerate(reference):
            assert sorted(row for rank in fed for row in rank[step]) == sorted(whole), name
        for ours, theirs in zip(losses_by_source(folder, name), losses_by_source(folder, "one"), strict=True):
            assert ours[3] == theirs[3], name
            assert ours[2] == pytest.approx(theirs[2], rel=1e-5), name
        assert digests(folder, name) == expected
        for ours, theirs in zip(validated(folder, name), losses, strict=True):
            assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], rel=1e-5)
            assert ours[3]["bits_per_byte"] == pytest.approx(theirs[3]["bits_per_byte"], rel=1e-5)


def test_a_loss_is_the_mean_of_its_sources(folder, reference):
    seen = list(losses_by_source(folder, "one"))
    assert len(seen) == STEPS
    for loss, mean, losses, _ in seen:
        assert loss == pytest.approx(mean, rel=1e-6)
        assert len(set(losses)) == len(SIZES)


def test_restarts_on_other_layouts_continue(folder, reference):
    """Stopped after steps 2 and 4."""
    fed = []
    for (ranks, local_batch), steps in zip([(2, 2), (4, 1), (1, 4)], (2, 4, STEPS), strict=True):
        argv = arguments(
            folder, "restarted", local_batch, **{"training.steps": steps, "lr_scheduler.total_steps": STEPS}
        )
        by_rank = run_ranks(train, ranks, argv)
        fed += [[row for rank in by_rank for row in rank[step]] for step in range(len(by_rank[0]))]
    assert [sorted(rows) for rows in fed] == [sorted(rows) for rows in reference]
    assert digests(folder, "restarted") == digests(folder, "one")


RAMP = {"training.batch_ramp": "2,2,12", "training.global_batch_size": 8, "training.seq_len": 32}


def test_a_growing_batch_continues_at_the_same_sample(folder):
    """2, 2, 4, 6, 8 and 8 samples on any layout, also if a run resumes in the middle of the ramp."""
    runs = {"one": (1, 2, None), "two": (2, 1, None), "stages": (2, 2, "pipeline")}
    for name, (ranks, local_batch, degree) in runs.items():
        cut = {f"parallelism.{degree}_parallel_degree": 2} if degree else {}
        run_ranks(train, ranks, arguments(folder, f"ramp-{name}", local_batch, **RAMP, **cut))
    for (ranks, local_batch), steps in zip([(2, 1), (1, 1)], (4, STEPS), strict=True):
        stopped = {"training.steps": steps, "lr_scheduler.total_steps": STEPS}
        run_ranks(train, ranks, arguments(folder, "ramp-resumed", local_batch, **RAMP, **stopped))
    one, *others = ([*read_rows(folder / f"ramp-{name}" / "metrics.jsonl")] for name in (*runs, "resumed"))
    assert [row["n_tokens_seen"] for row in one] == [32 * n for n in (2, 4, 8, 14, 22, 30)]
    for rows in others:
        for ours, theirs in zip(rows, one, strict=True):
            assert [ours[key] for key in ("n_tokens_seen", "lr", "data_digest_chain")] == [
                theirs[key] for key in ("n_tokens_seen", "lr", "data_digest_chain")
            ]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def stream_arguments(folder, run, local_batch, **overrides):
    """One source of the mixture is a stream."""
    streamed = {"data.sources.plays.streaming": "true", "data.packing": "best_fit", "validation.enable": "false"}
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
        run_ranks(train_in_small_windows, ranks, stream_arguments(folder, "stream-again", local_batch, **later))
    assert digests(folder, "stream-again") == digests(folder, "stream")
    manifest = json.loads((folder / "stream-again/checkpoint/step-6/manifest.json").read_text())
    assert manifest["data"]["cursors"]["plays"][0] > 1 and manifest["data"]["counts"]["prose"] > 4


def test_another_mixture_is_refused_before_a_model_is_built(folder, reference):
    argv = arguments(folder, "one", 8, **{"data.sources.verse.weight": 4, "training.steps": 9})
    (message,) = run_ranks(refusal, 1, argv)
    assert "sources.verse.weight: saved 3.0, now 4.0" in message and "data.allow_change" in message


def refusal(argv):
    from torchtitan_like import train as module

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "build_model", None)  # would fail otherwise
        with pytest.raises(DataError) as refused:
            build(argv)
    return str(refused.value)


def refusal_of_a_copy(argv, key, other):
    """Rank 1 is on a node that has another copy of a text."""
    return refusal([*argv, f"--{key}", str(other)] if dist.get_rank() else argv)


@pytest.mark.parametrize(
    ("key", "name"),
    [("data.sources.plays.path", "sources.plays.num_tokens"), ("validation.sources.plays.path", "validation plays")],
)
def test_ranks_with_different_texts_end_before_a_model_is_built(folder, key, name):
    other = folder / "stale" / "plays.jsonl"
    other.parent.mkdir(exist_ok=True)
    other.write_text((folder / "plays.jsonl").read_text().replace("hamlet 7 ", "hamlet and macbeth "))
    first, second = run_ranks(refusal_of_a_copy, 2, arguments(folder, "copies", 4), key, other)
    assert first == second and f"ranks read different texts: {name} is " in first


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_step_is_shown_from_the_checkpoint_alone(folder, reference, step, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    saved = folder / "one/checkpoint/step-4"
    assert titan(["data", "show", str(saved), "--step", str(step), "--whole"]) == 0
    output = capsys.readouterr().out
    assert "metrics.jsonl of the run: " in output and "the same" in output
    assert output.count(" epoch 0 sample ") == 8
    tokenizer = load_tokenizer(JobConfig().model.tokenizer_folder)
    for row in reference[step - 1]:
        assert tokenizer.decode(row) in output


def test_a_step_is_shown_as_json(folder, reference, capsys, monkeypatch):
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


def test_a_step_of_a_stream_is_shown_while_a_run_reads_it(folder, capsys, monkeypatch):
    """The run's windows stay, and none is added."""
    run_ranks(train_in_small_windows, 1, stream_arguments(folder, "shown", 8))
    monkeypatch.chdir(ROOT)

    def windows():
        return {path: path.stat().st_mtime_ns for path in folder.glob("tokens/window-*")}

    before = windows()
    with small_windows():
        assert titan(["data", "show", str(folder / "shown/checkpoint/step-2"), "--step", "5"]) == 0
    assert "the same" in capsys.readouterr().out
    assert before and windows() == before


def test_another_text_shows_another_digest(folder, reference, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    other = folder / "other.jsonl"
    other.write_text((folder / "plays.jsonl").read_text().replace("hamlet", "macbeth"))
    saved = str(folder / "one/checkpoint/step-4")
    assert titan(["data", "show", saved, "--step", "5", "--data.sources.plays.path", str(other)]) == 2
    assert "sources.plays.text: saved" in capsys.readouterr().err
