"""Count the collectives of real steps. test_parallelism_guide.py runs the command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import count_collectives
from scripts.count_collectives import Row, count, kind_of, rows_of, table
from tests.distributed.parity import build, options, release
from tests.distributed.test_expert_parallel import arguments
from tests.distributed.test_moe import EP
from tests.harness.rank_pool import run_ranks

TP, PP, CP, REPLICATE = (
    f"parallelism.{name}_degree"
    for name in (
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "data_parallel_replicate",
    )
)
METHOD = "parallelism.context_parallel_rotate_method"
# 2 layers, 8 samples of 32 tokens, dim 32, 4 heads, 2 kv heads, float32.
ACTIVATION = 8 * 32 * 32 * 4
KEYS = 8 * 32 * 2 * 16 * 4


def counted_step(argv: list[str]) -> list[Row]:
    trainer: Any = build(argv)
    for step in (1, 2):
        fetched = trainer.fetch(step)
        sums = fetched.agreement.wait()
        _, rows = count(
            trainer.world,
            lambda step=step, fetched=fetched, sums=sums: trainer.train_step(step, fetched, sums),
        )
    release(trainer)
    return [row for row in rows if row.largest > 1024]  # without norms and the loss


def number_and_bytes(
    tmp_path: Path, world_size: int, **overrides: object
) -> dict[tuple[str, str], tuple[int, int]]:
    return count_on_ranks(world_size, options(str(tmp_path / "run"), "float32", **overrides))


def count_on_ranks(world_size: int, argv: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    first, *others = run_ranks(counted_step, world_size, argv)
    assert all(rows == first for rows in others)
    return {(row.over, row.kind): (row.number, row.nbytes) for row in first}


def test_tensor_parallelism_moves_each_activation_eight_times_per_layer(tmp_path: Path) -> None:
    """Embedding and head move it four times. Half are all-gathers, half reduce-scatters."""
    collectives = number_and_bytes(tmp_path, 2, **{TP: 2})
    assert (
        collectives["tp", "all-gather"]
        == collectives["tp", "reduce-scatter"]
        == (2 * 4 + 2, (2 * 4 + 2) * ACTIVATION)
    )


def test_context_parallelism_gathers_keys_and_values_once_per_layer(tmp_path: Path) -> None:
    collectives = number_and_bytes(tmp_path, 2, **{CP: 2})
    assert collectives["cp", "all-gather"] == collectives["cp", "reduce-scatter"] == (2, 2 * KEYS)
    # Weights are sharded over CP ranks too.
    assert collectives["dp_shard", "reduce-scatter"][0] == 4


def test_ulysses_exchanges_two_tensors_per_layer_and_direction(tmp_path: Path) -> None:
    """One all-to-all exchanges queries, keys and values. Another one exchanges the output."""
    (number, nbytes) = number_and_bytes(tmp_path, 2, **{CP: 2, METHOD: "ulysses"})[
        "cp", "all-to-all"
    ]
    assert (number, nbytes) == (2 * 2 * 2, 2 * 2 * (2 * ACTIVATION + KEYS) // 2)


def test_a_ring_sends_keys_and_values_and_their_gradients(tmp_path: Path) -> None:
    (_, nbytes) = number_and_bytes(tmp_path, 2, **{CP: 2, METHOD: "alltoall"})["cp", "send"]
    # Each rank sends half of all keys, in forward and, with gradients, in backward.
    assert nbytes > 2 * KEYS


def test_a_pipeline_sends_each_micro_batch_once_and_its_gradient_back(tmp_path: Path) -> None:
    balanced = {
        f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")
    }
    collectives = number_and_bytes(tmp_path, 2, **{PP: 2, **balanced})
    assert collectives["pp", "send"] == (8, ACTIVATION)


def test_a_shard_of_the_weights_is_gathered_for_each_pass(tmp_path: Path) -> None:
    """Layers, head and embedding are one group each. Backward gathers the layers again."""
    collectives = number_and_bytes(tmp_path, 2, **{"training.local_batch_size": 4})
    assert (
        collectives["dp_shard", "all-gather"][0] == 6
        and collectives["dp_shard", "reduce-scatter"][0] == 4
    )


@pytest.mark.parametrize(("recomputation", "exchanges"), [("none", 4), ("full", 6)])
def test_expert_parallelism_exchanges_rows_four_times_per_layer(
    tmp_path: Path, recomputation: str, exchanges: int
) -> None:
    """Full recomputation sends the rows of the forward pass again, but not their numbers."""
    argv = arguments(
        tmp_path / "run",
        **{
            EP: 2,
            "training.local_batch_size": 4,
            "activation_checkpoint.mode": recomputation,
            "debug.moe_force_load_balance": "true",  # each rank receives as many rows as it sends
        },
    )
    num_layers, num_experts, top_k = 2, 8, 2
    rows = top_k * ACTIVATION // 2  # bytes; each rank has half of the samples
    counts = num_experts * 8
    assert count_on_ranks(2, argv)["ep", "all-to-all"] == (
        num_layers * (exchanges + 1),
        num_layers * (exchanges * rows + counts),
    )


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
def test_kind_of_an_operator(operator: str, kind: str | None) -> None:
    assert kind_of(operator) == kind


def test_bytes_sent_by_a_rank() -> None:
    """A ring of n ranks sends (n - 1)/n of the tensor. An all-reduce sends it twice."""
    log = [
        ("a", 4, "all-reduce", 100),
        ("a", 4, "all-reduce", 300),
        ("b", 2, "all-gather", 10),
        ("c", 2, "send", 7),
    ]
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


def test_an_invalid_config_starts_no_rank(repo_root: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(repo_root)
    assert (
        count_collectives.main(
            ["train_configs/debug_model.toml", "--world-size", "3", "--model.flavor", "9B"]
        )
        == 78
    )
    captured = capsys.readouterr()
    assert captured.out == "" and "model.flavor" in captured.err


def test_ranks_can_import_external_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the current folder and in PYTHONPATH can be imported, as in training."""
    search_paths = []

    def refuse(
        command: list[str], env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[str]:
        search_paths.append(env["PYTHONPATH"].split(os.pathsep))
        return subprocess.CompletedProcess(command, 78, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/models")
    monkeypatch.setattr(count_collectives.subprocess, "run", refuse)
    assert count_collectives.main(["x.toml"]) == 78
    assert search_paths == [[str(count_collectives.ROOT), str(tmp_path), "/models"]]
