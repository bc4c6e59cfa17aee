"""The count of collectives, of real steps on ranks. tests/unit/scripts/test_parallelism_guide.py runs the command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import count_collectives
from scripts.count_collectives import Row, count, kind_of, rows_of, table
from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks

TP, PP, CP, REPLICATE = (
    f"parallelism.{name}_degree"
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
)
METHOD = "parallelism.context_parallel_rotate_method"
# 2 layers, 8 samples of 32 tokens, 32 wide, 4 heads of which 2 of keys and values; float32.
ACTIVATION = 8 * 32 * 32 * 4
KEYS = 8 * 32 * 2 * 16 * 4


def counted_step(argv: list[str]) -> list[Row]:
    trainer: Any = build(argv)
    for step in (1, 2):
        fetched = trainer.fetch(step)
        sums = fetched.agreement.wait()
        _, rows = count(
            trainer.world, lambda step=step, fetched=fetched, sums=sums: trainer.train_step(step, fetched, sums)
        )
    release(trainer)
    return [row for row in rows if row.largest > 1024]  # norms and the loss aside


def number_and_bytes(tmp_path: Path, world_size: int, **overrides: object) -> dict[tuple[str, str], tuple[int, int]]:
    argv = options(str(tmp_path / "run"), "float32", **overrides)
    first, *others = run_ranks(counted_step, world_size, argv)
    assert all(rows == first for rows in others)
    return {(row.over, row.kind): (row.number, row.nbytes) for row in first}


def test_tensor_parallelism_moves_each_activation_eight_times_per_layer(tmp_path: Path) -> None:
    """And four times for embedding and head, half of it gathers and half scatters."""
    found = number_and_bytes(tmp_path, 2, **{TP: 2})
    assert found["tp", "all-gather"] == found["tp", "reduce-scatter"] == (2 * 4 + 2, (2 * 4 + 2) * ACTIVATION)


def test_context_parallelism_gathers_keys_and_values_once_per_layer(tmp_path: Path) -> None:
    found = number_and_bytes(tmp_path, 2, **{CP: 2})
    assert found["cp", "all-gather"] == found["cp", "reduce-scatter"] == (2, 2 * KEYS)
    assert found["dp_shard", "reduce-scatter"][0] == 4  # weights are cut over its ranks as well


def test_ulysses_exchanges_two_tensors_per_layer_and_direction(tmp_path: Path) -> None:
    """Queries, keys and values in one all-to-all before attention, the output in one after it."""
    (number, nbytes) = number_and_bytes(tmp_path, 2, **{CP: 2, METHOD: "ulysses"})["cp", "all-to-all"]
    assert (number, nbytes) == (2 * 2 * 2, 2 * 2 * (2 * ACTIVATION + KEYS) // 2)


def test_a_ring_sends_keys_and_values_and_their_gradients(tmp_path: Path) -> None:
    (_, nbytes) = number_and_bytes(tmp_path, 2, **{CP: 2, METHOD: "alltoall"})["cp", "send"]
    assert nbytes > 2 * KEYS  # each rank sends half of all keys, and again in backward, with the gradients


def test_a_pipeline_sends_each_micro_batch_once_and_its_gradient_back(tmp_path: Path) -> None:
    less = {f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    found = number_and_bytes(tmp_path, 2, **{PP: 2, **less})
    assert found["pp", "send"] == (8, ACTIVATION)


def test_a_shard_of_the_weights_is_gathered_for_each_pass(tmp_path: Path) -> None:
    """One group of weights for each layer, the head and the embedding; those of the layers are gathered again in backward."""
    found = number_and_bytes(tmp_path, 2, **{"training.local_batch_size": 4})
    assert found["dp_shard", "all-gather"][0] == 6 and found["dp_shard", "reduce-scatter"][0] == 4


NORM_BYTES = 8  # one float64 for all ranks


def test_replicas_exchange_all_gradients(tmp_path: Path) -> None:
    local = {"training.local_batch_size": 4}
    ((key, (number, nbytes)),) = number_and_bytes(tmp_path, 2, **{REPLICATE: 2}, **local).items()
    sharded = number_and_bytes(tmp_path, 2, **local)
    assert key == ("dp_replicate", "all-reduce") and number == 4 + 1  # gradients, and their norm
    assert sharded["dp_shard", "reduce-scatter"] == (4, nbytes - NORM_BYTES)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("c10d.allreduce_.default", "all-reduce"),
        ("c10d._allgather_base_.default", "all-gather"),
        ("c10d._reduce_scatter_base_.default", "reduce-scatter"),
        ("_c10d_functional.all_gather_into_tensor.default", "all-gather"),
        ("_c10d_functional.reduce_scatter_tensor.default", "reduce-scatter"),
        ("_c10d_functional.all_to_all_single.default", "all-to-all"),
        ("c10d.send.default", "send"),
        ("c10d.recv_.default", None),
        ("_c10d_functional.wait_tensor.default", None),
        ("c10d.barrier.default", None),
    ],
)
def test_kinds(operator: str, kind: str | None) -> None:
    assert kind_of(operator) == kind


def test_what_a_rank_sends() -> None:
    """In a ring of n: (n - 1)/n of the tensor; twice that for an all-reduce, which scatters and gathers."""
    log = [("a", 4, "all-reduce", 100), ("a", 4, "all-reduce", 300), ("b", 2, "all-gather", 10), ("c", 2, "send", 7)]
    assert rows_of(log) == [
        Row("a", 4, "all-reduce", 2, 300, 400, 600.0),
        Row("b", 2, "all-gather", 1, 10, 10, 5.0),
        Row("c", 2, "send", 1, 7, 7, 7),
    ]


def test_different_ranks_have_separate_tables() -> None:
    rows = rows_of([("pp", 2, "send", 2**20)])
    lines = table({"pp": 2, "tp": 2}, [rows, rows, [], []])
    assert lines[0] == "One step of 4 ranks: pp 2 x tp 2"
    assert "ranks 0, 1:" in lines and "ranks 2, 3:" in lines and lines[-1] == "  nothing"
    assert any("1.000 MiB" in line for line in lines)


def test_a_config_that_cannot_work_starts_no_rank(repo_root: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(repo_root)
    assert count_collectives.main(["train_configs/debug_model.toml", "--world-size", "3", "--model.flavor", "9B"]) == 78
    captured = capsys.readouterr()
    assert captured.out == "" and "model.flavor" in captured.err


def test_a_model_from_outside_is_found_by_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the current folder, as in training, and in PYTHONPATH."""
    seen = []

    def refuse(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(env["PYTHONPATH"].split(os.pathsep))
        return subprocess.CompletedProcess(command, 78, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/models")
    monkeypatch.setattr(count_collectives.subprocess, "run", refuse)
    assert count_collectives.main(["x.toml"]) == 78
    assert seen == [[str(count_collectives.ROOT), str(tmp_path), "/models"]]
