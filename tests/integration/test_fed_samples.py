"""Ranks that train on a mixture of three file formats read the same samples as a plain loop.

`python -m tests.integration.test_fed_samples FOLDER` repeats the test under torchrun for all
layouts, which takes half an hour.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash

from tests.faults.trainer import FinishedRun, Run, Starter, Torchrun, kill
from tests.harness.runner import ROOT
from tests.unit.data.conftest import write_jsonl
from tests.unit.data.independent_reader import pattern_of
from tests.unit.data.reference import digest_of
from tests.unit.data.test_documents import write_table
from tests.unit.data.token_writers import write_flat, write_npy
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.data.samples.order import shuffled
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.util.host import num_cores
from torchtitan_like.util.jsonl import read_rows
from torchtitan_like.util.labels import IGNORED_LABEL

ASSETS = ROOT / "tests/assets/tokenizer"
SEED, SEQ_LEN, GLOBAL_BATCH, STEPS = 7, 32, 40, 50
NUM_SAMPLES = GLOBAL_BATCH * STEPS
WEIGHTS = {"web": 5.0, "books": 3.0, "code": 2.0}


class Layout(NamedTuple):
    ranks: int
    workers: int
    accumulation: int


ALL_LAYOUTS = [Layout(*layout) for layout in itertools.product((1, 2, 4), (0, 2, 4), (1, 2))]
TESTED_LAYOUTS = [Layout(2, 4, 2)]  # in addition to KILLED
# A run that is killed at these steps and resumes on another layout.
KILLED = [(Layout(2, 2, 1), 8), (Layout(1, 4, 2), 19), (Layout(4, 0, 2), STEPS)]


class Sample(NamedTuple):
    source: str
    epoch: int
    tokens: tuple[int, ...]  # SEQ_LEN + 1, fewer at the end of a source


def lines_of_text() -> list[str]:
    documents = DATASETS["shakespeare"].file.read_text(encoding="utf-8").splitlines()
    lines = "\n".join(json.loads(document)["text"] for document in documents[:30]).split("\n")
    return [f"{number}: {line}" for number, line in enumerate(lines)]


def write_corpus(folder: Path) -> dict[str, Path]:
    """Write sources of about 800, 400 and 250 samples, which 2,000 samples all repeat."""
    lines, tokenizer = lines_of_text(), load_tokenizer(ASSETS)
    web, books, code = lines[:1500], lines[1500:2300], lines[2300:2800]
    for part in range(3):
        write_jsonl(folder / "web" / f"{part}.jsonl", web[500 * part : 500 * (part + 1)])
    (folder / "books").mkdir()
    for part in range(2):
        write_table(
            folder / "books" / f"{part}.parquet", books[400 * part : 400 * (part + 1)], rows=50
        )
    encoded = [[*tokenizer.encode(line), tokenizer.eos_id] for line in code]
    write_flat(folder / "code" / "0.bin", itertools.chain(*encoded[:300]))
    write_npy(folder / "code" / "1.npy", list(itertools.chain(*encoded[300:])))
    return {name: folder / name for name in WEIGHTS}


def plain_loop(corpus: Mapping[str, Path]) -> list[Sample]:
    """Read the files one by one and return the sample at each position."""
    import pyarrow.parquet

    tokenizer = load_tokenizer(ASSETS)
    texts = {
        "web": [
            json.loads(line)["text"]
            for file in sorted(corpus["web"].glob("*.jsonl"))
            for line in file.open()
        ],
        "books": [
            text
            for file in sorted(corpus["books"].glob("*.parquet"))
            for text in pyarrow.parquet.read_table(file)["text"].to_pylist()
        ],
    }
    tokens = {
        name: [
            token
            for text in items
            for token in (tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id)
        ]
        for name, items in texts.items()
    }
    flat = [np.fromfile(corpus["code"] / "0.bin", "<u2"), np.load(corpus["code"] / "1.npy")]
    tokens["code"] = np.concatenate(flat).tolist()
    samples = {
        name: [
            tuple(items[first : first + SEQ_LEN + 1]) for first in range(0, len(items) - 1, SEQ_LEN)
        ]
        for name, items in tokens.items()
    }
    # Weights count tokens: a source with a short last sample needs slightly more samples.
    exact = {name: WEIGHTS[name] * len(samples[name]) / (len(tokens[name]) - 1) for name in WEIGHTS}
    read, stream = Counter[str](), []
    names = list(exact)
    for index in itertools.islice(pattern_of(list(exact.values())), NUM_SAMPLES):
        name = names[index]
        epoch, within = divmod(read[name], len(samples[name]))
        key = xxhash.xxh3_64_intdigest(name.encode(), SEED)
        sample = int(shuffled(np.array([within]), len(samples[name]), key, epoch)[0])
        stream.append(Sample(name, epoch, samples[name][sample]))
        read[name] += 1
    for name, items in samples.items():  # an epoch contains each sample once
        assert len(set(items)) == len(items) < read[name]
        assert sorted(s.tokens for s in stream if s.source == name and s.epoch == 0) == sorted(
            items
        )
    return stream


def arguments(corpus: Mapping[str, Path], folder: Path, layout: Layout) -> list[str]:
    values: dict[str, Any] = {
        "job.config_file": ROOT / "train_configs/debug_model.toml",
        "job.dump_folder": folder,
        "experimental.custom_import": "tests.harness.print_batches",
        "model.hf_assets_path": ASSETS,
        "model.args.dim": 16,
        "model.args.n_layers": 1,
        "model.args.n_heads": 2,
        "model.args.multiple_of": 16,
        "model.args.max_seq_len": SEQ_LEN,
        "training.seq_len": SEQ_LEN,
        "training.global_batch_size": GLOBAL_BATCH,
        "training.local_batch_size": GLOBAL_BATCH // (layout.ranks * layout.accumulation),
        "training.dataloader.num_workers": layout.workers,
        "training.steps": STEPS,
        "lr_scheduler.warmup_steps": 3,
        "data.cache_folder": folder.parent.parent / "tokens",
        "checkpoint.enable": "true",
        "checkpoint.interval": 5,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
        "validation.enable": "false",
        "debug.seed": SEED,
    }
    for name, path in corpus.items():
        values |= {f"data.sources.{name}.path": path, f"data.sources.{name}.weight": WEIGHTS[name]}
    values["data.sources.code.format"] = "tokens"
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def wait_for_step(run: Run, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not (rows := complete_rows(folder)) or rows[-1]["step"] < step:
        assert not run.is_over() and time.monotonic() < deadline, (
            f"step {step} was not reached: {run.wait().tail}"
        )
        time.sleep(0.01)


def complete_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.open() if line.endswith("\n")] if path.exists() else []
    )


def printed_batches(output: str) -> Iterator[dict[str, Any]]:
    """Yield the batches that `tests/harness/print_batches.py` printed, except a truncated line."""
    for line in output.splitlines():
        _, mark, content = line.partition("fed ")
        if mark and content.endswith("]]}"):
            yield json.loads(content)


def run_parts(
    starter: Starter, corpus: Mapping[str, Path], folder: Path, parts: Sequence[tuple[Layout, int]]
) -> Iterator[FinishedRun]:
    """Run in one folder, with a kill after each step of `parts`; the last run finishes."""
    for layout, step in parts:
        run = starter.start(arguments(corpus, folder, layout), layout.ranks, folder)
        if step < STEPS:
            wait_for_step(run, folder, step)
            kill(list(run.pids().values()))
        ended = run.wait(180)
        assert step < STEPS or set(ended.codes) == {0}, ended.tail
        yield ended


def check(folder: Path, runs: Sequence[FinishedRun], expected: Sequence[Sample]) -> str:
    """Compare the ranks' samples and the metrics with the plain loop; return a summary."""
    samples_by_position: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for run in runs:
        num_reads = Counter[int]()
        for batch in printed_batches(run.output):
            for position, tokens, padded, source in batch["samples"]:
                labels = [label for label in padded if label != IGNORED_LABEL]
                assert padded[len(labels) :] == [IGNORED_LABEL] * (SEQ_LEN - len(labels))
                assert labels[:-1] == tokens[1 : len(labels)]
                samples_by_position[position].append(
                    (list(WEIGHTS)[source], (*tokens[: len(labels)], labels[-1]))
                )
                num_reads[position] += 1
        assert set(num_reads.values()) == {1}, "expected each sample on one rank, once"
    assert sorted(samples_by_position) == list(range(NUM_SAMPLES))
    for (_, samples_read), sample in zip(
        sorted(samples_by_position.items()), expected, strict=True
    ):
        assert set(samples_read) == {(sample.source, sample.tokens)}

    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    digests = [digest_of(list(sample.tokens), position) for position, sample in enumerate(expected)]
    for row, first in zip(rows, range(0, NUM_SAMPLES, GLOBAL_BATCH), strict=True):
        assert row["data_digest"] == f"{sum(digests[first : first + GLOBAL_BATCH]) % 2**64:016x}", (
            row["step"]
        )
    num_labels = Counter[str]()
    for sample in expected:
        num_labels[sample.source] += len(sample.tokens) - 1
    for name, count in num_labels.items():
        assert sum(row["sources"][name]["num_valid_tokens"] for row in rows) == count
    shares = {name: count / num_labels.total() for name, count in num_labels.items()}
    assert all(abs(shares[name] - weight / 10) < 0.005 for name, weight in WEIGHTS.items()), shares
    return f"shares {shares}, {len(runs)} runs, digest of all {rows[-1]['data_digest_chain']}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(corpus: Mapping[str, Path]) -> list[Sample]:
    return plain_loop(corpus)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", TESTED_LAYOUTS, ids=str)
def test_ranks_read_the_samples_of_a_plain_loop(
    fork_server: Starter,
    corpus: Mapping[str, Path],
    expected: Sequence[Sample],
    layout: Layout,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "outputs"
    check(folder, list(run_parts(fork_server, corpus, folder, [(layout, STEPS)])), expected)


@pytest.mark.nightly
def test_resumes_on_other_layouts_after_kills_read_the_same_samples(
    fork_server: Starter, corpus: Mapping[str, Path], expected: Sequence[Sample], tmp_path: Path
) -> None:
    folder = tmp_path / "outputs"
    runs = list(run_parts(fork_server, corpus, folder, KILLED))
    assert [run.has_output("resume from") for run in runs] == [False, True, True]
    has_warning = [
        run.has_output(f"ranks x (workers + 1) + 4 = {num_processes}")
        for run, num_processes in zip(runs, (10, 9, 8), strict=True)
    ]
    assert has_warning == [num_cores() < 10, num_cores() < 9, False], (
        "the last layout has no workers"
    )
    check(folder, runs, expected)


def main(folder: Path) -> None:
    (folder / "corpus").mkdir(parents=True)
    corpus, starter = write_corpus(folder / "corpus"), Torchrun(os.environ)
    expected = plain_loop(corpus)
    for number, parts in enumerate([*([(layout, STEPS)] for layout in ALL_LAYOUTS), KILLED]):
        outputs, start = folder / f"run-{number}" / "outputs", time.monotonic()
        summary = check(outputs, list(run_parts(starter, corpus, outputs, parts)), expected)
        print(
            f"{' then '.join(str(layout) for layout, _ in parts)}: "
            f"{summary}, {time.monotonic() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
