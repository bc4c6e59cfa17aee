"""Optimizers whose state exists from the start, has flat names, and which a non-finite gradient cannot corrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_like.optim.clipping import (
    clip_gradients,
    global_norm,
    local_gradients,
    local_norms,
    sum_of_squares,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection

Tensor = torch.Tensor
OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


def _groups(named: list[tuple[str, Tensor]], section: OptimizerSection) -> list[dict[str, Any]]:
    """Parameter groups: all decayed, except those whose name matches `optimizer.no_weight_decay`."""
    exempt = {name for name, _ in named if any(fnmatch(name, pattern) for pattern in section.no_weight_decay)}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if n not in exempt]},
        {"params": [p for n, p in named if n in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _build(named: list[tuple[str, Tensor]], section: OptimizerSection) -> torch.optim.Optimizer:
    fused = section.implementation == "fused"
    optimizer: torch.optim.Optimizer = OPTIMIZERS[section.name](
        _groups(named, section),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=fused,
        foreach=section.implementation == "foreach",
    )
    for _, p in named:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def _gated_step(optimizers: list[torch.optim.Optimizer], skip: Tensor, on_device: bool) -> None:
    """Step unless `skip` is 1: decided by the fused kernels themselves, or else on the host (one synchronisation)."""
    if not on_device and skip.item():
        return
    for optimizer in optimizers:
        if on_device:
            optimizer.found_inf = skip  # type: ignore[attr-defined]  # the name the fused kernels read
        optimizer.step()


class Optimizer:
    """Adam or AdamW over named parameters, with one rule for bad numbers: `skip` = 1 leaves every weight as it is.

    `fused` reads `skip` on the device. `foreach` and `for-loop` know no such gate, so they read it on the host: one
    synchronisation per step (logged at start). Hyper-parameters come from the config and the schedule, never from a
    checkpoint; the state holds tensors alone. `is_atomic`: a step updates all weights of all ranks or none.
    """

    is_atomic = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        section: OptimizerSection,
        all_ranks: ProcessGroup | None,
    ) -> None:
        self.all_ranks = all_ranks
        self.named = [(n, p) for n, p in named_parameters if p.requires_grad]
        self.gate_on_device = section.implementation == "fused"
        self.peak_lr: float = section.lr
        self._optimizers = self._make(section)

    def _make(self, section: OptimizerSection) -> list[torch.optim.Optimizer]:
        return [_build(self.named, section)]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for _, p in self.named]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the coming update."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip all gradients to a global norm of `max_norm`; returns the norm before (0-dim, equal on every rank).

        Raises RuntimeError when a parameter has none: an update without it would go unnoticed.
        """
        if missing := [name for name, parameter in self.named if parameter.grad is None]:
            raise RuntimeError(
                f"no gradient has reached {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} ({len(missing)} of "
                f"{len(self.named)} parameters): set requires_grad = False on what is not to be trained"
            )
        return clip_gradients(self.parameters, max_norm, self.all_ranks)

    def step(self, skip: Tensor) -> None:
        """Update the weights, or leave them when `skip` (0-dim float, 0 or 1) is 1."""
        _gated_step(self._optimizers, skip, self.gate_on_device)

    def zero_grad(self) -> None:
        for _, p in self.named:
            p.grad = None

    def _named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        state = {p: s for optimizer in self._optimizers for p, s in optimizer.state.items()}
        yield from ((name, state[p]) for name, p in self.named)

    def state_dict(self) -> dict[str, Tensor]:
        """Live state tensors under flat names, `state.<parameter>.<key>`: the same on every topology."""
        return {f"state.{n}.{key}": value for n, state in self._named_state() for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy a loaded state into the live one. A checkpoint read in place needs no copy."""
        for name, value in self.state_dict().items():
            if value is not state_dict[name]:
                value.copy_(state_dict[name])


class OptimizerInBackward(Optimizer):
    """Updates each weight as soon as its gradient is complete and frees the gradient at once.

    No gradient norm exists before the update, so nothing is clipped, and the gate is per weight: one whose gradient
    holds a non-finite number is left as it is. A non-finite *loss* makes every gradient non-finite (train.py), so it
    stops every weight on every rank; a single bad gradient stops only its own shard.
    """

    is_atomic = False

    def _make(self, section: OptimizerSection) -> list[torch.optim.Optimizer]:
        self._halted: Tensor | None = None
        self._norms: dict[int, list[Tensor]] = {}
        optimizers = []
        for name, parameter in self.named:
            optimizer = _build([(name, parameter)], section)
            parameter.register_post_accumulate_grad_hook(self._update_hook(optimizer))
            optimizers.append(optimizer)
        return optimizers

    def _update_hook(self, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            ((copies, (grad,)),) = local_gradients([parameter]).items()
            if grad.is_cpu and torch.cuda.is_initialized():  # offloaded: torch 2.11 does not wait for the copy
                torch.cuda.current_stream().synchronize()
            norms = local_norms([grad])
            self._norms.setdefault(copies, []).extend(norms)
            norm = norms[0] if len(norms) == 1 else torch.stack(norms).sum()
            skip = norm.isfinite().logical_not().float()
            if self._halted is not None:
                skip = torch.maximum(skip, self._halted)
            _gated_step([optimizer], skip, self.gate_on_device)
            parameter.grad = None

        return update

    def clip_gradients(self, max_norm: float) -> Tensor:
        """The norm of the gradients already applied; `max_norm` cannot act on them (preflight says so)."""
        norms, self._norms = self._norms, {}
        return global_norm(sum_of_squares(norms), self.all_ranks)

    def step(self, skip: Tensor) -> None:
        """The weights are updated already; from now on `skip` = 1 holds for every coming gradient."""
        self._halted = skip


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    section: OptimizerSection,
    all_ranks: ProcessGroup | None = None,
) -> Optimizer:
    """Build the optimizer of `[optimizer]` over `named_parameters` (canonical names, ties once).

    all_ranks: the group of all ranks of the run, which sums the gradient norm; None for one rank.
    """
    kind = OptimizerInBackward if section.early_step_in_backward else Optimizer
    return kind(named_parameters, section, all_ranks)
