"""Cost of an update by each optimizer against AdamW's, and the memory of a parameter.

    python -m benchmarks.optimizers [--rounds 5] [--tokens 2048]

One process and thread, CPU time. Each round measures forward and backward of the Llama 3 debug
model and one update by every optimizer; the table has medians of times and of ratios within a
round. `of a step`: (forward + backward + update) against the same with AdamW of the same weights.
Rows with EMA also average the weights (`[ema]`). AdamW8bit needs torchao.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchtitan_like.config.sections_training import EMA
from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.matrices import MatrixOwners
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.optim.ema import AveragedWeights
from torchtitan_like.optim.optimizer import Optimizer, OptimizerContext, build_optimizer
from torchtitan_like.util.shards import local_positions

SPEC = get_spec("llama3")
ARGS = resolve_args(SPEC, "debugmodel", {"vocab_size": 2048})
STOCHASTIC = {"bf16_rounding": "stochastic"}
EMA_ROW = "AdamW, fused, with EMA"
# (name, dtype of the weights, settings); the first one of a dtype is the baseline
OPTIMIZERS: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    ("AdamW, fused", torch.float32, {}),
    ("AdamW, bfloat16 states", torch.float32, {"state_dtype": "bfloat16", **STOCHASTIC}),
    ("AdamW8bit", torch.float32, {"name": "AdamW8bit"}),
    (EMA_ROW, torch.float32, {}),
    ("Lion", torch.float32, {"name": "Lion"}),
    ("Muon", torch.float32, {"name": "Muon"}),
    ("Muon, muon_dtype float32", torch.float32, {"name": "Muon", "muon_dtype": "float32"}),
    ("AdamW, fused", torch.bfloat16, {}),
    ("AdamW, stochastic", torch.bfloat16, STOCHASTIC),
    ("AdamW, kahan", torch.bfloat16, {"bf16_rounding": "kahan"}),
    ("AdamW8bit, stochastic", torch.bfloat16, {"name": "AdamW8bit", **STOCHASTIC}),
    (EMA_ROW, torch.bfloat16, {}),
    ("Lion, stochastic", torch.bfloat16, {"name": "Lion", **STOCHASTIC}),
)


def build_model(dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        model = SPEC.build(ARGS).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, SPEC.init_table(ARGS), seed=0)
    return model


def build(model: Any, settings: dict[str, Any]) -> Optimizer:
    context = OptimizerContext(
        SPEC.sharding,
        partial(MatrixOwners, group=None),
        local_positions,
        torch.device("cpu"),
        seed=0,
        settings={},
    )
    return build_optimizer(model.named_parameters(), OptimizerSection(**settings), context)


class Update:
    """An update by an optimizer, and the average of the weights in rows with EMA."""

    def __init__(self, name: str, model: Any, settings: dict[str, Any]) -> None:
        self._optimizer = build(model, settings)
        self._average = None
        if name == EMA_ROW:
            self._average = AveragedWeights(self._optimizer.named, EMA(enable=True))
            self._average.start()

    def __call__(self) -> None:
        keep = torch.zeros(())
        self._optimizer.step(keep)
        if self._average is not None:
            self._average.update(keep)

    def states(self) -> list[torch.Tensor]:
        average = {} if self._average is None else self._average.state_dict()
        return [*self._optimizer.state_dict().values(), *average.values()]


def cpu_seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def bytes_per_parameter(model: Any, update: Update) -> float:
    """Return the bytes of weight, gradient and states for each element of the model."""
    weights = [(p.numel(), p.element_size()) for p in model.parameters()]
    states = sum(s.numel() * s.element_size() for s in update.states())
    return (sum(2 * n * size for n, size in weights) + states) / sum(n for n, _ in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {dtype: build_model(dtype) for dtype in (torch.float32, torch.bfloat16)}
    updates = [Update(name, models[dtype], settings) for name, dtype, settings in OPTIMIZERS]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ARGS.vocab_size, (1, options.tokens + 1), generator=generator)

    def forward_and_backward(model: Any) -> None:
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()

    rounds = []
    for number in range(options.rounds + 1):
        passes = {
            dtype: cpu_seconds(partial(forward_and_backward, model))
            for dtype, model in models.items()
        }
        times = [cpu_seconds(update) for update in updates]
        if number:  # the first round warms up
            rounds.append((passes, times))
    baselines = {
        dtype: next(i for i, row in enumerate(OPTIMIZERS) if row[1] is dtype) for dtype in models
    }
    num_parameters = sum(p.numel() for p in models[torch.float32].parameters())
    print(f"{num_parameters:,} parameters, {options.tokens} tokens, {options.rounds} rounds\n")
    print("| optimizer | weights | update | against AdamW | of a step | bytes per parameter |")
    print("| --- | --- | --- | --- | --- | --- |")
    for i, (name, dtype, _) in enumerate(OPTIMIZERS):
        base = baselines[dtype]
        update = statistics.median(times[i] for _, times in rounds)
        ratio = statistics.median(times[i] / times[base] for _, times in rounds)
        of_step = statistics.median(
            (passes[dtype] + times[i]) / (passes[dtype] + times[base]) for passes, times in rounds
        )
        num_bytes = bytes_per_parameter(models[dtype], updates[i])
        print(
            f"| {name} | {str(dtype).removeprefix('torch.')} | {1e3 * update:.0f} ms | {ratio:.2f} "
            f"| {of_step:.3f} | {num_bytes:.2f} |"
        )


if __name__ == "__main__":
    main()
