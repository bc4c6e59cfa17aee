"""Run the trainer on several ranks and compare the results with one rank.

A parity cell is one layout, model and dtype. `compare` defines all tolerances.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_like.build import attach, build_checkpointer
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.initialize import weight_hash
from torchtitan_like.distributed.world import LaunchedAs, build_mesh
from torchtitan_like.models.layers.balance import WHOLE_SEQUENCE, count_in_backward
from torchtitan_like.models.layers.moe import MoE
from torchtitan_like.optim.balancing import ExpertLoads
from torchtitan_like.run import build_world, resolve_run
from torchtitan_like.train import Trainer

ROOT = Path(__file__).resolve().parents[2]
LR = 8e-4
PRECISIONS = {"float32": 5, "float64": 3}  # dtype -> steps


@dataclass
class Trace:
    """Values recorded from one cell: one list entry per step, full tensors by name as float64."""

    weight_hash: int = 0
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    digest: list[int] = field(default_factory=list)
    num_valid_tokens: list[int] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    averages: dict[str, np.ndarray] = field(default_factory=dict)
    validation: list[float] = field(default_factory=list)
    loads: list[ExpertLoads] = field(default_factory=list)
    choices: list[np.ndarray] = field(default_factory=list)
    expert_state: list[dict[str, np.ndarray]] = field(default_factory=list)


def weights_mesh(dims: ParallelDims) -> DeviceMesh:
    """Build the mesh of the weights over all ranks, for tests without a trainer."""
    ranks = range(dims.world_size)
    return build_mesh("cpu", dims.weights_shape(), ranks=ranks, timeout=timedelta(minutes=1))


def options(folder: str, dtype: str, **overrides: object) -> list[str]:
    """Return arguments for a tiny model on short, masked documents.

    They disable the warm-up, because a small learning rate would hide errors. An override of None
    leaves a key out.
    """
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
    return [
        part
        for key, value in values.items()
        if value is not None
        for part in (f"--{key}", str(value))
    ]


def short_documents(folder: Path) -> Path:
    """Write a dataset of short documents, so that the number of masked labels varies by sample."""
    path = folder / "short.jsonl"
    if not path.exists():
        with open(ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl") as corpus:
            words = json.loads(next(corpus))["text"].split()
        starts = [i * 17 + i % 5 * 3 for i in range(len(words) // 20)]
        pieces = [" ".join(words[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


def full(tensor: torch.Tensor) -> np.ndarray:
    """Return the full tensor. All ranks must call this function if it is sharded."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().double().numpy().copy()


def of_all_stages(trainer: Trainer, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Merge the tensors of all pipeline stages."""
    if trainer.world.dims.pp == 1:
        return tensors
    return {
        name: tensor
        for stage_tensors in trainer.world.step_group.gather_objects(tensors)
        for name, tensor in stage_tensors.items()
    }


def build(argv: list[str]) -> Trainer:
    """Build the trainer of this pool rank, like `run.run_job`."""
    torch._dynamo.reset()  # a fresh process has no compiled code either
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = resolve_run(argv, world_size)
    world = build_world(run, LaunchedAs(rank, rank, world_size))
    checkpointer = build_checkpointer(run, world)
    try:
        starts = checkpointer.find_start(run.config.training.steps)
        return Trainer(attach(run, world, checkpointer, starts))
    except BaseException:
        checkpointer.close()
        raise


def release(trainer: Trainer) -> None:
    """Close the trainer, like `run.run_job`."""
    trainer.close()
    trainer.checkpointer.close()
    trainer.world.leave()
    functorch_config.activation_memory_budget = 1.0  # this process runs more tests


def run_cell(argv: list[str], mutation: str = "") -> Trace | None:
    """Train on this pool rank and record a trace. Ranks other than 0 return None."""
    trainer = build(argv)
    trace = Trace()
    shares = trainer.world.step_group.gather_objects(sum(map(weight_hash, trainer.parts)))
    trace.weight_hash = sum(shares) % 2**64
    clip = trainer.optim.optimizer.clip_gradients

    def traced_clip(max_norm: float) -> torch.Tensor:
        if mutation and mutation not in BALANCE_MUTATIONS:
            (MUTATIONS | EXPERT_MUTATIONS)[mutation](trainer)
        # Updates in backward have freed the gradients.
        gradients = {
            n: full(p.grad) for n, p in trainer.optim.optimizer.named if p.grad is not None
        }
        trace.gradients.append(of_all_stages(trainer, gradients))
        return clip(max_norm)

    trainer.optim.optimizer.clip_gradients = traced_clip
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
    if mutation in BALANCE_MUTATIONS:
        BALANCE_MUTATIONS[mutation](trainer)
    if trainer.optim.balancer is not None:
        trace_experts(trainer, trace)
    if mutation == "one micro-batch dropped":
        whole_step = trainer.train_step

        def short_step(step, fetched, agreement):
            fetched.batch = replace(fetched.batch, first_samples=fetched.batch.first_samples[:-1])
            return whole_step(step, fetched, agreement)

        trainer.train_step = short_step
    if mutation == "rank 0's tokens uncounted":
        trainer.world.step_group.sum_async = _forgetting_rank_0(trainer)
    trainer.train()
    trace.parameters = of_all_stages(
        trainer, {name: full(p) for name, p in trainer.optim.optimizer.named}
    )
    if trainer.optim.ema is not None:
        averages = {name: full(a) for name, a in trainer.optim.ema.named_averages().items()}
        trace.averages = of_all_stages(trainer, averages)
    release(trainer)
    return trace if trainer.is_leader else None


def trace_experts(trainer: Trainer, trace: Trace) -> None:
    """Trace each update's loads, choices of experts, and the state that balances them."""
    update = trainer.optim.balancer.update
    choices = count_choices(trainer)

    def traced_update(skip: torch.Tensor, is_logged: bool) -> None:
        update(skip, is_logged)
        trace.loads.append(trainer.optim.balancer.read())
        trace.choices.append(sum_choices(trainer, choices))
        state = {
            name: buffer.numpy().copy()
            for part in trainer.parts
            for name, buffer in part.named_buffers()
            if name.endswith(("expert_bias", "load_fractions"))
        }
        trace.expert_state.append(of_all_stages(trainer, state))

    trainer.optim.balancer.update = traced_update


CHOICE_BUCKETS = 1024


def count_choices(trainer: Trainer) -> list[torch.Tensor]:
    """Let backward count pairs of a token and an expert that it chose, for each MoE layer.

    Returns a histogram (CHOICE_BUCKETS,) int64 of each layer's pairs, which does not depend on the
    order of the tokens. The first of its logits, rounded to 1e-4, identifies a token: in float64,
    layouts differ by about 1e-13. Backward counts, so that recomputation and evaluation do not.
    """
    histograms = []
    for layer in _layers(trainer):
        histogram = torch.zeros(CHOICE_BUCKETS, dtype=torch.int64)
        histograms.append(histogram)

        def weigh(logits, expert_ids, weigh=layer.router.weigh, histogram=histogram):
            token = (logits.detach()[:, :1] * 1e4).round().to(torch.int64)
            pairs = (token * 7919 + expert_ids * 104729) % CHOICE_BUCKETS
            return count_in_backward(weigh(logits, expert_ids), pairs, histogram)

        layer.router.weigh = weigh
    return histograms


def sum_choices(trainer: Trainer, histograms: list[torch.Tensor]) -> np.ndarray:
    """Return the histograms of all layers and ranks (layers, CHOICE_BUCKETS), and reset them."""
    balancer = trainer.optim.balancer
    total = torch.zeros(len(balancer.layers), CHOICE_BUCKETS, dtype=torch.int64)
    if balancer._is_counted and histograms:
        total[balancer._rows] = torch.stack(histograms)
    for histogram in histograms:
        histogram.zero_()
    dist.all_reduce(total)
    return total.numpy()


def _scale(pattern: str, factor: float) -> Callable[[Trainer], None]:
    def mutate(trainer: Trainer) -> None:
        parameters = [p for name, p in trainer.optim.optimizer.named if pattern in name]
        assert parameters or trainer.world.dims.pp > 1, pattern  # another stage may own it
        for p in parameters:
            p.grad.mul_(factor)

    return mutate


def _swap_ranks(trainer: Trainer) -> None:
    """Exchange gradient shards between ranks 0 and 1, 2 and 3, and so on.

    This fault simulates a wrong rank order in a mesh. The loss of this step and the gradient norm
    do not change. Pipeline stages exchange their layers.
    """
    gradients = {
        re.sub(r"layers\.\d+", "layers", name): _local(p.grad)
        for name, p in trainer.optim.optimizer.named
    }
    peer_gradients = trainer.world.step_group.gather_objects(gradients)[trainer.world.rank ^ 1]
    common = [
        name
        for name in gradients
        if name in peer_gradients and gradients[name].shape == peer_gradients[name].shape
    ]
    assert common
    for name in common:
        gradients[name].copy_(peer_gradients[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _forgetting_rank_0(trainer: Trainer):
    """Return a sum that leaves rank 0's token count out of the denominator."""
    original = trainer.world.step_group.sum_async
    return lambda values: original([values[0] * (trainer.world.rank != 0), *values[1:]])


# Faults that a check of only loss, gradient norm and AdamW-updated parameters would miss.
# `compare` must detect each of them.
MUTATIONS: dict[str, Callable[[Trainer], None]] = {
    "one norm gradient x 2": _scale("layers.0.attention_norm", 2.0),
    "wk x 4": _scale("wk", 4.0),
    "embedding gradient 0": _scale("tok_embeddings", 0.0),
    "all x 0.5": _scale("", 0.5),
    "one micro-batch dropped": lambda trainer: None,
    "ranks swapped": _swap_ranks,
    "rank 0's tokens uncounted": lambda trainer: None,
}


def _swap_rows(trainer: Trainer) -> None:
    """Return each computed row to the token of the row before, from the second step on."""
    for layer in _layers(trainer):

        def compute_rows(rows, routes, compute=layer.experts.compute_rows):
            return compute(rows, routes).roll(1, 0)

        layer.experts.compute_rows = compute_rows


def _keep_weights(trainer: Trainer) -> None:
    for layer in _layers(trainer):
        layer.router.normalize = False


def _layers(trainer: Trainer) -> list[MoE]:
    return [module for module in trainer.parts.modules() if isinstance(module, MoE)]


# Faults of experts, each of which must turn a cell red.
EXPERT_MUTATIONS: dict[str, Callable[[Trainer], None]] = {
    "expert gradients x 2": _scale("moe.experts", 2.0),
    "router gradient x 2": _scale("moe.router", 2.0),
    "rows of two tokens swapped": _swap_rows,
    "weights not normalized": _keep_weights,
}


def _swap_choices(trainer: Trainer) -> None:
    """Exchange the chosen experts of neighboring tokens, which keeps the loads."""
    for layer in _layers(trainer):

        def select(logits, expert_bias, select=layer.router.select):
            return select(logits, expert_bias).roll(1, 0)

        layer.router.select = select


def _on_rank_1(change: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    return lambda trainer: change(trainer) if trainer.world.rank == 1 else None


def _skip_update(trainer: Trainer) -> None:
    """Run the collective, but keep this rank's biases unchanged."""
    trainer.optim.balancer._balance = lambda choices, skip: None


def _count_own_tokens(trainer: Trainer) -> None:
    trainer.optim.balancer._sum_over_ranks = lambda values: values


def _flip_signs(trainer: Trainer) -> None:
    balance = trainer.optim.balancer._balance
    trainer.optim.balancer._balance = lambda choices, skip: balance(-choices, skip)


def _scale_losses(trainer: Trainer) -> None:
    """As if each rank divided by its own tokens."""
    prepare = trainer.optim.balancer.prepare
    trainer.optim.balancer.prepare = lambda num_tokens: prepare(num_tokens // trainer.world.size)


def _weigh_with_bias(trainer: Trainer) -> None:
    for layer in _layers(trainer):

        def weigh(logits, expert_ids, weigh=layer.router.weigh, bias=layer.expert_bias):
            return weigh(logits + bias, expert_ids)

        layer.router.weigh = weigh


def _skip_second_update(trainer: Trainer) -> None:
    gate, norms = trainer.guard.update_gate.gate, []

    def skip_second(grad_norm: torch.Tensor, **options) -> torch.Tensor:
        norms.append(grad_norm)
        return torch.maximum(gate(grad_norm, **options), torch.tensor(float(len(norms) == 2)))

    trainer.guard.update_gate.gate = skip_second


def _own_part_of_sequence(trainer: Trainer) -> None:
    for layer in _layers(trainer):
        layer.sequence = WHOLE_SEQUENCE


# Faults of expert balancing. `compare_experts` must detect each of them.
BALANCE_MUTATIONS: dict[str, Callable[[Trainer], None]] = {
    "counts of one rank": _count_own_tokens,
    "bias update skipped on one rank": _on_rank_1(_skip_update),
    "signs flipped": _flip_signs,
    "bias in the weights": _weigh_with_bias,
    "choices of two tokens swapped": _swap_choices,
    "losses per rank": _scale_losses,
    "losses over parts of sequences": _own_part_of_sequence,
    "second update skipped": _skip_second_update,
}


def compare_experts(reference: Trace, cell: Trace, tolerance: float) -> None:
    """Raise AssertionError if expert loads or balancing states differ.

    Loads are integers and determine the biases, so they must be bit-equal. With a tolerance for
    float64, each token must also choose the same experts.
    """
    if tolerance <= 1e-10:
        for actual, expected in zip(cell.choices, reference.choices, strict=True):
            assert expected.any() and np.array_equal(actual, expected), "experts of each token"
    for actual, reference_value in zip(cell.loads, reference.loads, strict=True):
        assert actual.choices == reference_value.choices, "loads of experts"
        for name in ("router_z", "aux_loss", "bias_range"):
            expected = getattr(reference_value, name)
            np.testing.assert_allclose(
                np.array(getattr(actual, name), float),
                np.array(expected, float),
                rtol=tolerance,
                err_msg=name,
            )
    for actual, reference_value in zip(cell.expert_state, reference.expert_state, strict=True):
        assert actual.keys() == reference_value.keys(), "balancing state of experts"
        for name, values in reference_value.items():
            assert np.array_equal(actual[name], values), name


def compare(reference: Trace, cell: Trace, dtype: str) -> None:
    """Raise AssertionError if a cell differs from one rank. In float64 the tolerance is 1e-10."""
    assert cell.weight_hash == reference.weight_hash, "weights differ at step 0"
    assert cell.digest == reference.digest, "the input tokens differ"
    assert cell.num_valid_tokens == reference.num_valid_tokens, "the numbers of valid tokens differ"
    is_float64 = dtype == "float64"
    scalar = 1e-10 if is_float64 else 1e-5
    np.testing.assert_allclose(cell.loss, reference.loss, rtol=scalar, err_msg="loss")
    np.testing.assert_allclose(
        cell.grad_norm, reference.grad_norm, rtol=scalar, err_msg="grad_norm"
    )
    np.testing.assert_allclose(
        cell.validation, reference.validation, rtol=scalar, err_msg="validation loss"
    )
    for step, (actual, expected) in enumerate(
        zip(cell.gradients, reference.gradients, strict=True), start=1
    ):
        limit = 1e-10 if is_float64 else (1e-5 if step == 1 else 1e-4)
        assert actual.keys() == expected.keys(), "the sets of parameters with gradients differ"
        for name, gradient in expected.items():
            error = np.linalg.norm(actual[name] - gradient) / np.linalg.norm(gradient)
            assert error <= limit, (
                f"gradient of {name} at step {step}: relative error {error:.2e} > {limit}"
            )
    compare_experts(reference, cell, scalar)
    assert cell.averages.keys() == reference.averages.keys()
    for name, value in (reference.parameters | reference.averages).items():
        difference = np.abs((cell.parameters | cell.averages)[name] - value)
        if is_float64:
            error = np.linalg.norm(difference) / np.linalg.norm(value)
            assert error <= 1e-10, f"{name}: relative error {error:.2e}"
        else:
            # Adam divides by sqrt(v), so an element with a gradient near zero may move by up to lr
            # in either direction.
            assert (difference <= 1e-5).mean() >= 0.9999, (
                f"{name}: {(difference > 1e-5).sum()} elements differ"
            )
            assert difference.max() <= LR, f"{name}: an element differs by {difference.max():.2e}"
