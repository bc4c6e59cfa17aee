"""One parity cell: the shipped build and step of train.py on some ranks, and its comparison with one rank.

What "the same numbers" means, and with which tolerance, is written once, in `compare`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist

from torchtitan_like.build import build_checkpointer
from torchtitan_like.distributed.initialize import weight_hash
from torchtitan_like.distributed.world import LaunchedAs
from torchtitan_like.launch import join, read_config
from torchtitan_like.resilience.position import RankPosition
from torchtitan_like.resilience.requests import Requests
from torchtitan_like.train import Trainer

ROOT = Path(__file__).resolve().parents[2]
LR = 8e-4
PRECISIONS = {"float32": 5, "float64": 3}  # dtype -> steps


@dataclass
class Trace:
    """What a cell did: per step, and full tensors by canonical name as float64."""

    weight_hash: int = 0
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    digest: list[int] = field(default_factory=list)
    num_valid_tokens: list[int] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    validation: list[float] = field(default_factory=list)


def options(folder: str, dtype: str, **overrides: object) -> list[str]:
    """A tiny model on ragged, masked documents; no warm-up, which would hide errors."""
    values = {
        "job.dump_folder": folder,
        "model.hf_assets_path": ROOT / "tests/assets/tokenizer",
        "model.args.dim": 32,
        "model.args.n_layers": 2,
        "model.args.n_heads": 4,
        "model.args.n_kv_heads": 2,
        "model.args.multiple_of": 16,
        "training.dataset_path": short_documents(Path(folder).parent),
        "training.seq_len": 32,
        "training.local_batch_size": 8,
        "training.global_batch_size": 8,
        "training.steps": PRECISIONS[dtype],
        "training.dtype": dtype,
        "training.mixed_precision_param": dtype,
        "training.mixed_precision_reduce": dtype,
        "optimizer.lr": LR,
        "lr_scheduler.warmup_steps": 0,
        "data.cache_folder": Path(folder).parent / "tokens",
        "data.mask_document_starts": True,
        "debug.seed": 42,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
        **overrides,
    }
    return [part for key, value in values.items() for part in (f"--{key}", str(value))]


def short_documents(folder: Path) -> Path:
    """A text of many short documents, so that each sample has another number of masked labels."""
    path = folder / "short.jsonl"
    if not path.exists():
        with open(ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl") as corpus:
            words = json.loads(next(corpus))["text"].split()
        starts = [i * 17 + i % 5 * 3 for i in range(len(words) // 20)]
        pieces = [" ".join(words[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


def full(tensor: torch.Tensor) -> np.ndarray:
    """The whole tensor, whatever its layout; a collective where it is sharded."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().double().numpy().copy()


def of_all_stages(trainer: Trainer, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the stages of a pipeline hold, together."""
    if trainer.world.dims.pp == 1:
        return tensors
    return {name: part for some in trainer.world.step_group.gather_objects(tensors) for name, part in some.items()}


def build(argv: list[str]) -> Trainer:
    """The trainer of this rank of a pool, as `launch.run` builds it."""
    torch._dynamo.reset()  # a process of its own has compiled nothing yet
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = read_config(argv, world_size)
    world = join(config, LaunchedAs(rank, rank, world_size))
    checkpointer = build_checkpointer(config.checkpoint, config.job, config.model, world)
    try:
        return Trainer(config, world, checkpointer, checkpointer.find_start(config.training.steps), Requests(), RankPosition())
    except BaseException:
        checkpointer.close()
        raise


def release(trainer: Trainer) -> None:
    """What `launch.run` does at the end."""
    trainer.close()
    trainer.checkpointer.close()
    trainer.world.leave()
    functorch_config.activation_memory_budget = 1.0  # other tests go on in this process


def run_cell(argv: list[str], mutation: str = "") -> Trace | None:
    """Train on this rank of a pool as train.py does and trace it; only rank 0 returns the trace."""
    trainer = build(argv)
    trace = Trace()
    shares = trainer.world.step_group.gather_objects(sum(map(weight_hash, trainer.parts)))
    trace.weight_hash = sum(shares) % 2**64
    clip = trainer.optimizer.clip_gradients

    def traced_clip(max_norm: float) -> torch.Tensor:
        if mutation:
            (MUTATIONS | EXPERT_MUTATIONS)[mutation](trainer)
        trace.gradients.append(of_all_stages(trainer, {name: full(p.grad) for name, p in trainer.optimizer.named}))
        return clip(max_norm)

    trainer.optimizer.clip_gradients = traced_clip
    record = trainer.metrics.record

    def traced_record(step):
        shares = trainer.world.gather_losses(step.loss_share.double())
        trace.loss.append(shares.sum().item())
        trace.grad_norm.append(step.grad_norm.item())
        trace.digest.append(step.data_digest)
        trace.num_valid_tokens.append(step.num_valid_tokens)
        record(step)

    trainer.metrics.record = traced_record
    validation = trainer.metrics.validation

    def traced_validation(step, mean, *rest):
        trace.validation.append(mean)
        validation(step, mean, *rest)

    trainer.metrics.validation = traced_validation
    if mutation == "one micro-batch dropped":
        whole_step = trainer.train_step

        def short_step(step, fetched, agreement):
            fetched.batch = replace(fetched.batch, first_samples=fetched.batch.first_samples[:-1])
            return whole_step(step, fetched, agreement)

        trainer.train_step = short_step
    if mutation == "rank 0's tokens uncounted":
        trainer.world.step_group.sum_async = _forgetting_rank_0(trainer)
    trainer.train()
    trace.parameters = of_all_stages(trainer, {name: full(p) for name, p in trainer.optimizer.named})
    release(trainer)
    return trace if trainer.is_leader else None


def _scale(pattern: str, factor: float) -> Callable[[Trainer], None]:
    def mutate(trainer: Trainer) -> None:
        hit = [p for name, p in trainer.optimizer.named if pattern in name]
        assert hit or trainer.world.dims.pp > 1, pattern  # it may be on another stage
        for p in hit:
            p.grad.mul_(factor)

    return mutate


def _swap_ranks(trainer: Trainer) -> None:
    """Ranks 0 and 1, 2 and 3 ... exchange their shares of the gradients, as where a mesh has them in another order.

    Neither the loss of this step nor the norm of the gradients tells. Stages of a pipeline exchange their layers.
    """
    own = {re.sub(r"layers\.\d+", "layers", name): _local(p.grad) for name, p in trainer.optimizer.named}
    theirs = trainer.world.step_group.gather_objects(own)[trainer.world.rank ^ 1]
    common = [name for name in own if name in theirs and own[name].shape == theirs[name].shape]
    assert common
    for name in common:
        own[name].copy_(theirs[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _forgetting_rank_0(trainer: Trainer):
    """What rank 0 counts is missing from every denominator."""
    original = trainer.world.step_group.sum_async
    return lambda values: original([values[0] * (trainer.world.rank != 0), *values[1:]])


# Faults that loss, grad norm and parameters under AdamW would let pass, each of which must turn a cell red.
MUTATIONS: dict[str, Callable[[Trainer], None]] = {
    "one norm gradient x 2": _scale("layers.0.attention_norm", 2.0),
    "wk x 4": _scale("wk", 4.0),
    "embedding gradient 0": _scale("tok_embeddings", 0.0),
    "all x 0.5": _scale("", 0.5),
    "one micro-batch dropped": lambda trainer: None,
    "ranks swapped": _swap_ranks,
    "rank 0's tokens uncounted": lambda trainer: None,
}
EXPERT_MUTATIONS: dict[str, Callable[[Trainer], None]] = {
    "expert gradients x 2": _scale("moe.experts", 2.0),
    "router gradient x 2": _scale("moe.router", 2.0),
}


def compare(reference: Trace, cell: Trace, dtype: str) -> None:
    """Raise AssertionError where a cell is not the same as one rank (float64: 1e-10; float32: as written here)."""
    assert cell.weight_hash == reference.weight_hash, "weights differ at step 0"
    assert cell.digest == reference.digest, "other tokens were read"
    assert cell.num_valid_tokens == reference.num_valid_tokens, "valid tokens were counted differently"
    wide = dtype == "float64"
    scalar = 1e-10 if wide else 1e-5
    np.testing.assert_allclose(cell.loss, reference.loss, rtol=scalar, err_msg="loss")
    np.testing.assert_allclose(cell.grad_norm, reference.grad_norm, rtol=scalar, err_msg="grad_norm")
    np.testing.assert_allclose(cell.validation, reference.validation, rtol=scalar, err_msg="validation loss")
    for step, (ours, theirs) in enumerate(zip(cell.gradients, reference.gradients, strict=True), start=1):
        limit = 1e-10 if wide else (1e-5 if step == 1 else 1e-4)
        assert ours.keys() == theirs.keys(), "other parameters have gradients"
        for name, gradient in theirs.items():
            error = np.linalg.norm(ours[name] - gradient) / np.linalg.norm(gradient)
            assert error <= limit, f"gradient of {name} at step {step}: relative error {error:.2e} > {limit}"
    for name, value in reference.parameters.items():
        difference = np.abs(cell.parameters[name] - value)
        if wide:
            error = np.linalg.norm(difference) / np.linalg.norm(value)
            assert error <= 1e-10, f"{name}: relative error {error:.2e}"
        else:
            # Adam divides by sqrt(v): an element whose gradient is nearly zero may move by up to lr either way.
            assert (difference <= 1e-5).mean() >= 0.9999, f"{name}: {(difference > 1e-5).sum()} elements differ"
            assert difference.max() <= LR, f"{name}: an element differs by {difference.max():.2e}"
