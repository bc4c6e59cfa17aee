"""Compare the planner's memory and times with measurements, and check its suggestions."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.rank_pool import run_ranks
from torchtitan_like.cli import main as titan
from torchtitan_like.distributed.tensor import apply_tensor_parallel
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan.layouts import NETS, Cluster, Model, Plan, model_of
from torchtitan_like.plan.memory import bytes_per_token, memory
from torchtitan_like.plan.search import suggest

SEQ = 64
SIZES = {
    "dim": 128,
    "n_layers": 1,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 64,
    "multiple_of": 64,
    "max_seq_len": SEQ,
}


def saved_bytes(tp: int) -> float:
    """Return the bytes per token that one bfloat16 block saves for backward.

    Weights and rotary tables do not count.
    """
    spec = get_spec("llama3")
    with torch.device("meta"):
        model = spec.build(resolve_args(spec, "debugmodel", SIZES)).to(torch.bfloat16)
    if tp > 1:
        apply_tensor_parallel(model, spec, init_device_mesh("cpu", (tp,)), sequence_parallel=True)
    model.to_empty(device="cpu").init_buffers(torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.ones_(getattr(parameter, "_local_tensor", parameter))
    tensors = [getattr(p, "_local_tensor", p) for p in model.parameters()] + list(model.buffers())
    excluded = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved: dict[int, torch.Tensor] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in excluded:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, SEQ // tp, SIZES["dim"], dtype=torch.bfloat16, requires_grad=True)
    (block,) = model.layers.values()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        block(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / SEQ


def sizes() -> Model:
    args = resolve_args(get_spec("llama3"), "debugmodel", SIZES)
    widths = (args.dim, args.ffn_dim, args.n_heads, args.num_kv_heads, args.vocab_size)
    return Model(1e6, 1, *widths, False, "tiny")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_per_token_equal_a_real_block(tp: int) -> None:
    assert run_ranks(saved_bytes, tp, tp) == [bytes_per_token(sizes(), tp)] * tp


def test_memory_is_close_to_a_published_run() -> None:
    """TorchTitan logged 47.4 GiB (2025-08), 47.8 GiB (2025-11) and 49.7 GiB (2025-06).

    The runs trained Llama 3 8B on 8 H100 with FSDP, one sample of 8,192 tokens per rank, and
    recomputation of every second layer.
    """
    plan = Plan(pp=1, replicate=1, shard=8, cp=1, tp=1, micro=1, recompute="selective")
    assert memory(plan, model_of(8e9), 8192, 1).total == pytest.approx(48.3, rel=0.1)


@pytest.mark.parametrize(
    ("params", "gpus", "published"),
    [
        (8e9, 8, 7031),  # TorchTitan's log of 2025-08, eager
        (8e9, 128, 6514),  # report of 2024-12, compiled
        (70e9, 256, 597),  # report on async TP of 2025-06, FSDP 32 x TP 8
    ],
)
def test_tokens_per_second_are_close_to_published_runs(
    params: float, gpus: int, published: float
) -> None:
    """Estimates are within a third of TorchTitan's published bfloat16 tokens/s per H100."""
    cluster = Cluster(gpus, gpus // 8, 96, NETS["fast"], 400e12)
    best = suggest(model_of(params), cluster, 2 * gpus, 8192)[0]
    assert (
        best.num_micro * best.plan.micro * best.plan.dp * 8192 / best.seconds / gpus
        == pytest.approx(published, rel=1 / 3)
    )


def names(
    params: float,
    gpus: int,
    nodes: int = 1,
    net: str = "fast",
    gib: float = 80,
    seq_len: int = 8192,
) -> list[str]:
    batch = max(1, round(2**20 / seq_len / gpus)) * gpus
    cluster = Cluster(gpus, nodes, gib, NETS[net], 400e12)
    return [layout.plan.name for layout in suggest(model_of(params), cluster, batch, seq_len)]


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ({"params": 1.2e9, "gpus": 1}, "one GPU"),
        ({"params": 8e9, "gpus": 1}, "one GPU + CPU offload"),
        ({"params": 1.2e9, "gpus": 8}, "DDP 8"),  # all states fit on one GPU
        ({"params": 8e9, "gpus": 8}, "FSDP 8"),
        ({"params": 8e9, "gpus": 16, "nodes": 2}, "HSDP 2 x 8"),  # gathers stay inside a machine
        # One machine cannot hold all states.
        ({"params": 8e9, "gpus": 16, "nodes": 2, "gib": 40}, "TP 2 x FSDP 8"),
        # Only activations cross the network.
        ({"params": 70e9, "gpus": 64, "nodes": 8, "net": "slow"}, "PP 16 x TP 4"),
    ],
    ids=str,
)
def test_the_first_suggestion(case: dict, first: str) -> None:
    assert names(**case)[0] == first


def test_a_slow_network_ranks_sharding_over_machines_lower() -> None:
    fast, slow = (names(8e9, 16, 2, net) for net in ("fast", "slow"))
    assert fast.index("FSDP 16") < 3 and "FSDP 16" not in slow[:8]
    assert any(name.startswith("PP") for name in slow[1:4])


def test_suggestions_shard_long_sequences() -> None:
    assert all("CP" in name or "TP" in name for name in names(8e9, 8, seq_len=131072)[:5])


def toml_blocks(text: str) -> list[str]:
    return [block for block in text.split("\n\n") if block.startswith("# ")]


CASES = [
    ["--params", "8e9", "--gpus", "16", "--nodes", "2"],
    ["--params", "8e9", "--gpus", "16", "--nodes", "2", "--net", "slow"],
    ["--params", "1.24e9", "--gpus", "8"],
    ["--params", "70e9", "--gpus", "64", "--nodes", "8", "--net", "slow"],
    ["--params", "405e9", "--gpus", "512", "--nodes", "64"],
    ["--params", "8e9", "--gpus", "8", "--seq-len", "131072"],
    ["--params", "8e9", "--gpus", "1"],
]


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_suggested_configs_pass_the_check(
    arguments: list[str],
    tmp_path: Path,
    repo_root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
) -> None:
    """A bundled config extended with the suggested lines has no errors and no warnings."""
    monkeypatch.chdir(repo_root)
    assert titan(["plan", *arguments]) == 0
    blocks = toml_blocks(capsys.readouterr().out)
    assert 1 <= len(blocks) <= 3
    flavor = {"1.24e9": "1b", "8e9": "8b", "70e9": "70b", "405e9": "405b"}[arguments[1]]
    for block in blocks:
        (tmp_path / "plan.toml").write_text(
            f'extends = "{repo_root}/train_configs/llama3_{flavor}.toml"\n{block}'
        )
        code = titan(["check", str(tmp_path / "plan.toml"), "--world-size", arguments[3]])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        assert "parallelism" not in captured.err and "no effect" not in captured.err, captured.err


def test_memory_is_proportional_to_degrees() -> None:
    """Doubling a degree halves the memory that it shards."""
    model = model_of(8e9)
    plan = Plan(1, 1, 8, 1, 1, 1, "none")
    base = memory(plan, model, 8192, 1)
    assert base.states == pytest.approx(16 * 8.03e9 / 8 / 2**30, rel=1e-3)
    assert memory(Plan(1, 2, 4, 1, 1, 1, "none"), model, 8192, 1).states == pytest.approx(
        2 * base.states
    )
    assert memory(Plan(1, 1, 4, 1, 2, 1, "none"), model, 8192, 1).states == pytest.approx(
        base.states
    )
    assert memory(Plan(1, 1, 4, 2, 1, 1, "none"), model, 8192, 1).states == pytest.approx(
        base.states
    )
    assert memory(Plan(1, 1, 8, 1, 1, 2, "none"), model, 8192, 1).activations == pytest.approx(
        2 * base.activations
    )
    full = memory(Plan(1, 1, 8, 1, 1, 1, "full"), model, 8192, 1).activations
    assert (
        full
        < memory(Plan(1, 1, 8, 1, 1, 1, "selective"), model, 8192, 1).activations
        < base.activations
    )


def test_groups_share_the_network_of_a_node() -> None:
    cluster = Cluster(16, 2, 80, 100.0, 1e12)
    node_bandwidth = 450e9 * 0.8
    assert cluster.bandwidth(8, 1) == node_bandwidth and cluster.bandwidth(2, 4) == node_bandwidth
    assert cluster.bandwidth(16, 1) == 100e9 * 0.8  # one ring through both machines
    assert cluster.bandwidth(2, 8) == 100e9 * 0.8 / 8  # eight rings share the network
    assert cluster.bandwidth(8, 2) == 100e9 * 0.8 / 2


def test_the_memory_columns_of_each_row_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert titan(["plan", "--params", "8e9", "--gpus", "16", "--nodes", "2"]) == 0
    rows = re.findall(r"^ *\d+\. .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 8
    for row in rows:
        total, states, gathered, activations, rest, *_ = map(float, re.findall(r"\d+\.\d+", row))
        assert total == pytest.approx(states + gathered + activations + rest, abs=0.21)
    assert math.isclose(
        float(rows[0].split()[-1].replace(",", "")) * 16 * 9.62, 2**20, rel_tol=0.01
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--params", "8e9"],
        ["--params", "8e9", "--gpus", "0"],
        ["--params", "8e9", "--gpus", "9", "--nodes", "2"],
    ],
)
def test_invalid_arguments_return_2(arguments: list[str]) -> None:
    try:
        code: object = titan(["plan", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2


def test_a_model_that_does_not_fit_returns_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert titan(["plan", "--params", "405e9", "--gpus", "1"]) == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_suggestions_name_each_layout_once() -> None:
    suggested = names(8e9, 16, 2)
    assert len(suggested) == len(set(suggested))
