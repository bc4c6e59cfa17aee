"""Metrics of a mixture of experts: how evenly the tokens of a step are spread over the experts.

docs/reference/metrics.md lists the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchtitan_like.monitor.log import logger

if TYPE_CHECKING:
    from torchtitan_like.monitor.rows import Row

# Number of consecutive log steps without a token after which an expert is reported.
DEAD_AFTER = 5


class ExpertMetrics:
    """Computes the `moe` entry of a row of metrics.jsonl, and warns about experts without tokens.

    layers: the number of each MoE layer.
    expert_parallel: the number of ranks over which the experts of a layer are distributed.
    """

    def __init__(self, layers: Sequence[int], expert_parallel: int = 1) -> None:
        self._layers = layers
        self._expert_parallel = expert_parallel
        self._steps_without_tokens: dict[tuple[int, int], int] = {}  # by layer and expert
        self.fullest_expert = ""  # a sentence on the last log step; empty before the first one

    def row(
        self,
        choices: Sequence[Sequence[int]],
        router_z: Sequence[float],
        aux_loss: Sequence[float] | None,
        bias_range: Sequence[float] | None,
    ) -> Row:
        """Return the metrics of a log step. The arguments have an entry for each MoE layer.

        choices: for each expert, the number of tokens that chose it. router_z: mean of
        logsumexp(logits)^2. aux_loss: balance loss without its coefficient. bias_range: largest
        minus smallest selection bias.
        """
        self._warn(choices)
        self.fullest_expert = self._describe_fullest(choices)
        violations = [max_violation(counts) for counts in choices]
        row: Row = {
            "max_violation": max(violations),
            "mean_max_violation": _mean(violations),
            "load_entropy": _mean([load_entropy(counts) for counts in choices]),
            "dead_experts": sum(count == 0 for counts in choices for count in counts),
            "dropped_tokens": 0,
            "router_z": _mean(router_z),
        }
        if self._expert_parallel > 1:
            row["ep_imbalance"] = max(
                ep_imbalance(counts, self._expert_parallel) for counts in choices
            )
        if aux_loss is not None:
            row["aux_loss"] = _mean(aux_loss)
        if bias_range is not None:
            row["bias_range"] = max(bias_range)
        return row | {"max_violation_by_layer": violations}

    def _describe_fullest(self, choices: Sequence[Sequence[int]]) -> str:
        violation, layer, counts = max(
            (max_violation(counts), layer, counts)
            for layer, counts in zip(self._layers, choices, strict=True)
        )
        expert = counts.index(max(counts))
        return (
            f"At the last log step, expert {expert} of layer {layer} computed {violation + 1:.1f} "
            "times as many tokens as the mean expert. Uneven loads take memory on the rank that has "
            "the expert: set load_balance in [model.args], or raise load_balance_coeff."
        )

    def _warn(self, choices: Sequence[Sequence[int]]) -> None:
        """Warn once about each expert that received no token for `DEAD_AFTER` log steps."""
        dead = {
            (layer, expert): self._steps_without_tokens.get((layer, expert), 0) + 1
            for layer, counts in zip(self._layers, choices, strict=True)
            for expert, count in enumerate(counts)
            if count == 0
        }
        self._steps_without_tokens = dead
        new = [key for key, num_steps in dead.items() if num_steps == DEAD_AFTER]
        if new:
            names = ", ".join(f"{expert} of layer {layer}" for layer, expert in new[:5])
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            logger.warning(
                f"Experts without a token at {DEAD_AFTER} log steps in a row: {names}{more}. They "
                "are not trained: set load_balance in [model.args], or raise load_balance_coeff"
            )


def max_violation(counts: Sequence[int]) -> float:
    """Return the largest load / the mean load - 1 (MaxVio of arXiv:2408.15664); 0 if even."""
    total = sum(counts)
    return max(counts) * len(counts) / total - 1 if total else 0.0


def ep_imbalance(counts: Sequence[int], num_ranks: int) -> float:
    """Return the rows of the rank that receives the most / the mean rank's rows; 1 if even.

    Each rank has as many experts as the others, in their order.
    """
    num_local = len(counts) // num_ranks
    starts = range(0, len(counts), num_local)
    return max_violation([sum(counts[start : start + num_local]) for start in starts]) + 1


def load_entropy(counts: Sequence[int]) -> float:
    """Return the entropy of the loads / log(experts): 1 if even, 0 if one expert has all tokens."""
    total = sum(counts)
    if not total or len(counts) == 1:
        return 1.0
    shares = [count / total for count in counts if count]
    return -math.fsum(share * math.log(share) for share in shares) / math.log(len(counts))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
