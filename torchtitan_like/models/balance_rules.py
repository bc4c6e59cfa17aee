"""Load-balancing settings of a mixture of experts (MoE). Never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

METHODS = ("none", "bias", "sequence", "global")


@dataclass(frozen=True)
class Balance:
    """Load-balancing settings of an MoE layer.

    method:
        "none": no balancing.
        "bias": each expert has a bias that affects its selection but not its weight
            (arXiv:2408.15664). After each step, the bias rises by `coeff` if the expert's load is
            below the mean, and falls by `coeff` if it is above.
        "sequence": an auxiliary loss over each sequence (arXiv:2412.19437, equations 17 to 20).
        "global": the same loss with the loads of the whole global batch of the step before
            (arXiv:2501.11873).
    coeff: step size of the bias, or weight of the loss.
    z_coeff: weight of the router z-loss, the mean of logsumexp(logits)^2 (arXiv:2202.08906).
    sequence_coeff: with "bias", weight of an additional loss over each sequence; 0: no such loss.
        DeepSeek-V3 was trained with coeff = 1e-3 and sequence_coeff = 1e-4.
    """

    method: str = "none"
    coeff: float = 1e-3
    z_coeff: float = 0.0
    sequence_coeff: float = 0.0

    @property
    def has_sequence_loss(self) -> bool:
        return self.method == "sequence" or self.sequence_coeff > 0

    @property
    def has_loss(self) -> bool:
        """True if backward adds a balance loss, over sequences or the global batch."""
        return self.method == "global" or self.has_sequence_loss

    @property
    def loss_coeff(self) -> float:
        """Weight of the balance loss."""
        return self.sequence_coeff if self.method == "bias" else self.coeff


NO_BALANCE = Balance()


def check_balance(
    method: str, coeff: float, z_coeff: float, num_experts: int, sequence_coeff: float = 0.0
) -> list[str]:
    """Return one sentence for each problem of the model arguments of `Balance`."""
    problems = []
    if method not in METHODS:
        names = ", ".join(repr(name) for name in METHODS)
        problems.append(
            f"load_balance = {method!r}: expected one of {names}; set 'none' to disable balancing"
        )
    elif num_experts == 0 and method != "none":
        problems.append(
            f"load_balance = {method!r}: expected 'none', since num_experts = 0; remove it"
        )
    if sequence_coeff and method != "bias":
        problems.append(
            f"sequence_loss_coeff = {sequence_coeff}: expected 0 with load_balance = {method!r}; "
            'set load_balance = "bias", or "sequence" with load_balance_coeff for the loss alone'
        )
    for key, value in (
        ("load_balance_coeff", coeff),
        ("router_z_coeff", z_coeff),
        ("sequence_loss_coeff", sequence_coeff),
    ):
        if not 0 <= value < math.inf:
            problems.append(f"{key} = {value}: expected a number of at least 0; set {key} = 0")
    return problems
