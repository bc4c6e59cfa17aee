"""Forward and backward as a CUDA graph, without a GPU: `harness.cpu_graphs` records and repeats them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.harness.cpu_graphs import CPUGraph, recording, use_cpu_graphs
from torchtitan_like import open_run
from torchtitan_like.step import StepLosses
from torchtitan_like.train import Trainer
from torchtitan_like.util.cuda_graphs import WARMUP_STEPS, CapturedPass

NUM_STEPS = 5
SETTINGS = """
    validation.enable=false checkpoint.enable=false metrics.enable_tensorboard=false
    training.local_batch_size=2 training.seq_len=32 training.steps=100 debug.seed=1 metrics.log_freq=1
""".split()
ONE_LAYER = "model.args.n_layers=1"
EXPERTS = f"{ONE_LAYER} training.grouped_mm=kernel"
# Name -> file in train_configs, settings.
CONFIGS = {
    "dense": ("debug_model", f"{ONE_LAYER} loss.chunk_mib=1"),
    "ramp": ("debug_model", f"{ONE_LAYER} training.global_batch_size=8 training.batch_ramp=2,6,6"),
    "per_op": (
        "debug_model",
        f"{ONE_LAYER} activation_checkpoint.mode=selective "
        "activation_checkpoint.selective_ac_option=op "
        "activation_checkpoint.preserve_rng_state=false",
    ),
    "documents": ("debug_model", f"{ONE_LAYER} model.args.attn_mask_type=block_causal"),
    "muon": ("debug_model", f"{ONE_LAYER} optimizer.name=Muon ema.enable=true"),
    "verified": ("debug_model", f"{ONE_LAYER} resilience.verify_gradients_freq=5"),
    "qwen3_moe": (
        "qwen3_moe_debug",
        f"{EXPERTS} model.args.num_experts=16 training.global_batch_size=4",
    ),
    "deepseek_v3": (
        "deepseek_v3_debug",
        "model.args.n_layers=2 model.args.num_mtp_layers=1 training.grouped_mm=kernel",
    ),
    "gpt_oss": ("gpt_oss_debug", EXPERTS),
    "llama4": ("llama4_debug", "model.args.n_layers=2 training.grouped_mm=kernel"),
}


@contextmanager
def opened(name: str, folder: Path, repo_root: Path) -> Iterator[Trainer]:
    file, settings = CONFIGS[name]
    corpus = repo_root / "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
    two_sources = [f"data.sources.{source}.path={corpus}" for source in ("a", "b")]
    path = repo_root / f"train_configs/{file}.toml"
    folders = [f"job.dump_folder={folder}", f"data.cache_folder={folder.parent}/tokens"]
    options = [*SETTINGS, *two_sources, *settings.split(), *folders]
    with open_run(path, *options) as trainer:
        # No model has dropout; so that the seed of each micro-batch matters:
        trainer.parts[0].norm.register_forward_hook(lambda _, inputs, out: F.dropout(out, 0.1))
        yield trainer


def train(trainer: Trainer, num_steps: int = NUM_STEPS) -> tuple[list[Any], dict[str, Any]]:
    """Return the exact numbers of each step, and the weights, averages, and optimizer states."""
    rows: list[Any] = []
    for step in range(1, num_steps + 1):
        inputs = trainer.fetch(step)
        record = trainer.train_step(step, inputs, inputs.agreement.wait())
        mtp = record.mtp_loss_share
        rows.append(
            [
                record.loss_share.item(),
                record.loss_by_source.tolist(),
                None if mtp is None else mtp.item(),
                record.grad_norm.item(),
                record.skipped.item(),
                trainer.optim.expert_loads(),
            ]
        )
    tensors = {
        **trainer.states["model"].state_dict(),
        **trainer.optim.state_dict(),
        **trainer.optim.named_averages(),
    }
    return rows, {name: tensor.clone() for name, tensor in tensors.items()}


def record_operators(trainer: Trainer) -> dict[bool, list[Any]]:
    """Run eagerly, and return the operators of each micro-batch, by whether it starts a sum.

    Refuses to return values of tensors to the host.
    """
    runner, first = trainer.step_runner, trainer.optim.optimizer.parameters[0]
    recorded: dict[bool, list[Any]] = {True: [], False: []}

    def run(*inputs: Any, num_valid: int) -> StepLosses:
        starts_sum, reciprocal = first.grad is None, torch.tensor(1 / num_valid)
        with recording() as recorder:
            losses = runner._compute_losses(*inputs, lambda total: total * reciprocal)
        recorded[starts_sum].append(recorder.operators)
        return losses

    runner._pass = run
    return recorded


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_repeat_the_operators_of_eager_steps_with_equal_numbers(
    name: str, tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches call the same operators with the same shapes, and none reads on the host.

    The numbers of valid tokens are powers of two, so that reciprocals are exact on CPU too.
    """
    with opened(name, tmp_path / "eager", repo_root) as trainer:
        recorded = record_operators(trainer)
        rows, tensors = train(trainer)
    assert len(recorded[True]) >= NUM_STEPS and len(recorded[True][0]) > 50
    assert bool(recorded[False]) == (name in ("ramp", "qwen3_moe"))
    for operators in recorded.values():
        assert all(others == operators[0] for others in operators)
    use_cpu_graphs(monkeypatch)
    with opened(name, tmp_path / "graphs", repo_root) as trainer:
        runner = trainer.step_runner
        runner._pass = CapturedPass(runner._compute_losses, trainer.optim.optimizer.parameters)
        graph_rows, graph_tensors = train(trainer)
    assert CPUGraph.num_replays >= NUM_STEPS - WARMUP_STEPS
    assert graph_rows == rows
    assert graph_tensors.keys() == tensors.keys()
    assert all(torch.equal(graph_tensors[name], tensors[name]) for name in tensors)
