"""Batches, states, ends and errors are the same with and without worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from torchtitan_like.config.sections_training import (
    Data,
    DataLoader,
    DataSource,
    Training,
    Validation,
)
from torchtitan_like.data.batches.batch import (
    Batch,
    PlannedBatches,
    describe_core_shortage,
)
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.tokenizer import Tokenizer

Build = Callable[..., TrainBatches]


@pytest.fixture
def read_by(tokenizer: Tokenizer, corpus_file: Path) -> Iterator[Build]:
    loaders: list[TrainBatches] = []

    def build(
        num_workers: int, *, max_epochs: int = 0, layout: tuple[int, int] = (0, 1), **loader: Any
    ) -> TrainBatches:
        loaders.append(
            DataBuilder(
                Data(sources={"own": DataSource(path=str(corpus_file), max_epochs=max_epochs)}),
                tokenizer=tokenizer,
                dump_folder="unused",
                dp_rank=layout[0],
                dp_size=layout[1],
                with_positions=True,
            ).train_batches(
                Training(
                    seq_len=16,
                    local_batch_size=2,
                    dataloader=DataLoader(num_workers=num_workers, **loader),
                ),
                seed=7,
                global_batch_size=8,
            )
        )
        return loaders[-1]

    yield build
    for batches in loaders:
        batches._reader = None  # stops the workers immediately


def contents(batch: Batch) -> tuple[Any, ...]:
    assert batch.positions is not None
    tensors = (batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist())
    return (
        *tensors,
        batch.digest,
        batch.num_valid_tokens,
        batch.first_samples,
        batch.position,
        batch.num_samples,
    )


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, None), (2, 1), (4, 3)])
@pytest.mark.parametrize("layout", [(0, 1), (1, 2)])
def test_workers_do_not_change_batches(
    read_by: Build, num_workers: int, prefetch: int | None, layout: tuple[int, int]
) -> None:
    """The run reads two epochs, to the end of the data."""
    without_workers = read_by(0, max_epochs=2, layout=layout)
    with_workers = read_by(num_workers, max_epochs=2, layout=layout, prefetch_factor=prefetch)
    assert [contents(batch) for batch in with_workers] == [
        contents(batch) for batch in without_workers
    ]
    assert with_workers.position == without_workers.position


def test_the_state_counts_returned_batches_and_works_with_other_workers(read_by: Build) -> None:
    expected = [contents(batch) for batch in itertools.islice(read_by(0), 12)]
    actual, state = [], read_by(0).state_dict()
    for num_workers, steps in ((2, 3), (0, 4), (1, 5)):
        batches = read_by(num_workers)
        batches.load_state_dict(state)
        for _ in range(steps):
            batch = next(batches)
            actual.append(contents(batch))
            assert batches.position == batch.position
        state = batches.state_dict()
        assert state["position"] == 8 * len(actual)
    assert actual == expected


@pytest.mark.parametrize(("words", "is_short"), [(20, True), (2000, False)])
def test_a_source_with_less_text_than_a_step_reads_is_a_warning(
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    words: int,
    is_short: bool,
) -> None:
    (tmp_path / "text.txt").write_text("to be or not " * words)
    DataBuilder(
        Data(sources={"own": DataSource(path=str(tmp_path / "text.txt"))}),
        tokenizer=tokenizer,
        dump_folder="unused",
    ).train_batches(Training(seq_len=16, local_batch_size=8), seed=7, global_batch_size=8)
    warned = [r.getMessage() for r in caplog.records if "a step repeats its text" in r.getMessage()]
    assert [text.startswith("own has ") for text in warned] == [True] * is_short


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name().startswith("pt_data")]


def test_workers_leave_signals_to_the_main_process_and_end_with_it(read_by: Build) -> None:
    before = {child.pid for child in workers()}
    batches = read_by(2)
    expected = [contents(batch) for batch in itertools.islice(read_by(0), 6)]
    actual = [contents(next(batches)) for _ in range(2)]  # one of each worker: both have started
    new_workers = [child for child in workers() if child.pid not in before]
    assert len(new_workers) == 2
    for child, number in itertools.product(
        new_workers, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ):
        os.kill(child.pid, number)
    actual += [contents(next(batches)) for _ in range(4)]
    assert actual == expected
    batches._reader = None
    _, alive = psutil.wait_procs(new_workers, timeout=20)
    assert not alive


FAILING_SCRIPT = """
import builtins, sys
import torch
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.config.sections_training import DataLoader
from torchtitan_like.data.batches.batch import PlannedBatches, make_reader

def plans():
    yield from range(1000)

tensor = torch.zeros(1)
PlannedBatches.__getitem__ = lambda self, plan: Batch(tensor, tensor, tensor, 0, 0, [], plan, 1)
batches = make_reader(PlannedBatches(None, 1, with_positions=False), plans, DataLoader(num_workers=3))()
builtins.kept = batches  # as a traceback would keep it alive
assert next(batches).position == 0
raise ValueError("the error that ends the run")
"""


def test_workers_of_a_killed_process_end(tmp_path: Path) -> None:
    """Their batches fill a pipe that nobody reads any more."""
    script = FAILING_SCRIPT.replace("torch.zeros(1)", "torch.zeros(2**20)").replace(
        'raise ValueError("the error that ends the run")',
        "import os, psutil, signal\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    with open(tmp_path / "pids", "w") as output:  # the workers hold it open, so it is no pipe
        subprocess.run([sys.executable, "-c", script], stdout=output, timeout=60, check=False)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 30
    while running := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def test_an_error_ends_a_process_whose_workers_are_reading() -> None:
    """Workers ignore SIGTERM, and Python and torch wait for them when a process exits."""
    result = subprocess.run(
        [sys.executable, "-c", FAILING_SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: the error that ends the run")


def test_an_error_in_a_worker_is_raised_in_the_main_process(
    read_by: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: PlannedBatches, plan: Any) -> Batch:
        raise DataError(f"file x, token {plan.positions[0]}")

    monkeypatch.setattr(PlannedBatches, "__getitem__", fails)
    for num_workers in (0, 2):
        with pytest.raises(DataError, match="file x, token 0") as failed:
            next(read_by(num_workers))
        # The frames keep the loader alive. Its later deletion would wait 5 s for each worker.
        traceback.clear_frames(failed.tb)


@pytest.mark.parametrize("persistent", [False, True])
def test_every_validation_pass_with_workers_reads_the_same_batches(
    tokenizer: Tokenizer, corpus_file: Path, tmp_path: Path, persistent: bool
) -> None:
    def sets(**loader: Any) -> Any:
        section = Validation(
            enable=True, seq_len=16, local_batch_size=3, steps=5, dataloader=DataLoader(**loader),
            sources={"own": DataSource(path=str(corpus_file))},
        )  # fmt: skip
        sets_by_name = DataBuilder(
            Data(), tokenizer=tokenizer, dump_folder=str(tmp_path), with_positions=True
        ).validation_sets(section)
        return sets_by_name[""]

    expected = [contents(batch) for batch in sets()]
    with_workers = sets(num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        assert [contents(batch) for batch in with_workers] == expected
    assert (
        len(expected) == 5 and np.unique([digest for *_, digest, _, _, _, _ in expected]).size == 5
    )


@pytest.mark.parametrize(
    ("num_workers", "num_ranks", "num_cores", "required"),
    [(2, 8, 27, 28), (2, 8, 28, None), (1, 1, 5, 6), (1, 1, 6, None), (0, 8, 2, None)],
)
def test_too_few_cores_for_ranks_and_workers_are_reported(
    num_workers: int, num_ranks: int, num_cores: int, required: int | None
) -> None:
    problem = describe_core_shortage(num_workers, num_ranks, num_cores)
    if required is None:
        assert problem is None
    else:
        assert (
            problem is not None
            and f"{num_cores} CPU cores are too few for {num_ranks} ranks" in problem
        )
        assert (
            f"num_workers = {num_workers}. Expected ranks x (workers + 1) + 4 = {required} or more"
            in problem
        )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_single_core_is_reported_with_and_without_workers(num_workers: int) -> None:
    warning = describe_core_shortage(num_workers, 8, 1)
    assert (
        warning is not None
        and "Only 1 CPU core is available" in warning
        and "--cpus-per-task" in warning
    )


SILENT_SCRIPT = """
import signal, sys
from torchtitan_like.config.sections_training import DataLoader
from torchtitan_like.data.batches import batch

batch.POLL_SECONDS, batch.MAX_SECONDS = 0.1, 0.2
batch.PlannedBatches.__getitem__ = lambda self, plan: signal.pause()
batches = batch.PlannedBatches(None, 1, with_positions=False)
is_interrupted = sys.argv[1] == "interrupted"
next(batch.make_reader(batches, lambda: iter([1]), DataLoader(num_workers=1), lambda: is_interrupted)())
"""


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("interrupted", "ReadInterrupted"),
        ("waiting", "RuntimeError: The data loader's workers have"),
    ],
)
def test_a_process_ends_its_wait_for_a_silent_worker(state: str, error: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SILENT_SCRIPT, state],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert error in result.stderr.rstrip().splitlines()[-1]


def test_workers_need_no_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read_by: Build
) -> None:
    """The path of a socket in a temporary folder of 81 characters is too long."""
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))  # type: ignore[attr-defined]
    assert contents(next(read_by(1))) == contents(next(read_by(0)))
