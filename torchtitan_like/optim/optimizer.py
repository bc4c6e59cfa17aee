"""Adam and AdamW with eager state, flat state names, and updates gated on finite gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
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
    """Return parameter groups with and without weight decay, by `optimizer.no_weight_decay`."""
    exempt = {
        name
        for name, _ in named
        if any(fnmatch(name, pattern) for pattern in section.no_weight_decay)
    }
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if n not in exempt]},
        {"params": [p for n, p in named if n in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _build(named: list[tuple[str, Tensor]], section: OptimizerSection) -> torch.optim.Optimizer:
    fused = section.implementation == "fused"
    is_on_gpu = any(p.is_cuda for _, p in named)
    optimizer: torch.optim.Optimizer = OPTIMIZERS[section.name](
        _groups(named, section),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=fused,
        foreach=section.implementation == "foreach",
        # Step counts are on the GPU, so that `step_or_restore` can revert them.
        capturable=is_on_gpu and not fused,
    )
    for _, p in named:
        optimizer.state[p] = {
            "step": torch.zeros(
                (), dtype=torch.float32, device=p.device if fused or is_on_gpu else "cpu"
            ),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def _gated_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Step unless `skip` is 1. On a GPU, the host does not read `skip`."""
    if optimizer.defaults["fused"]:
        # The fused kernels read this attribute.
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
    elif skip.is_cuda:
        step_or_restore(optimizer, skip)
    elif not skip.item():
        optimizer.step()


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def step_or_restore(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Step, then restore all weights and states bitwise if `skip` is 1.

    For implementations without a gate. Needs memory for a copy of the weights and states. Integer
    multiplication by 0 or 1 selects the bits, which also removes NaN.
    """
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for tensor in (parameter, *optimizer.state[parameter].values()):
            local = tensor.to_local() if hasattr(tensor, "placements") else tensor
            integer = INTEGERS[local.element_size()]
            by_type[integer].append(local.view(integer))
    old = {integer: torch._foreach_mul(bits, skip.to(integer)) for integer, bits in by_type.items()}
    optimizer.step()
    for integer, bits in by_type.items():
        torch._foreach_mul_(bits, (1 - skip).to(integer))
        torch._foreach_add_(bits, old[integer])


class Optimizer:
    """Adam or AdamW over named parameters. A step with `skip` = 1 changes no weight.

    The `fused` implementation reads `skip` on the device. `foreach` and `for-loop` cannot: on a
    GPU, `step_or_restore` reverts their update; on the CPU, the host reads `skip`.

    The state contains only tensors. Hyperparameters come from the config and the schedule, never
    from a checkpoint. `is_atomic`: a step updates all weights of all ranks or none.
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
        self.peak_lr: float = section.lr
        self._optimizers = self._make(section)

    def _make(self, section: OptimizerSection) -> list[torch.optim.Optimizer]:
        return [_build(self.named, section)]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for _, p in self.named]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip all gradients to a global norm of `max_norm`.

        Returns the norm before clipping (0-dim, equal on every rank). Raises RuntimeError if a
        parameter has no gradient.
        """
        self._refuse_missing(name for name, parameter in self.named if parameter.grad is None)
        return clip_gradients(self.parameters, max_norm, self.all_ranks)

    def _refuse_missing(self, names: Iterable[str]) -> None:
        if missing := list(names):
            raise RuntimeError(
                f"{len(missing)} of {len(self.named)} parameters have no gradient: "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Expected a "
                "gradient for every trainable parameter. Set requires_grad = False on parameters "
                "that are not trained"
            )

    def step(self, skip: Tensor) -> None:
        """Update the weights unless `skip` (0-dim float, 0 or 1) is 1."""
        for optimizer in self._optimizers:
            _gated_step(optimizer, skip)

    def zero_grad(self) -> None:
        for _, p in self.named:
            p.grad = None

    def _named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        state = {p: s for optimizer in self._optimizers for p, s in optimizer.state.items()}
        yield from ((name, state[p]) for name, p in self.named)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state tensors under flat names, `state.<parameter>.<key>`.

        The names do not depend on the topology.
        """
        return {
            f"state.{n}.{key}": value
            for n, state in self._named_state()
            for key, value in state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy a loaded state into the live state. Tensors that were read in place are skipped."""
        for name, value in self.state_dict().items():
            if value is not state_dict[name]:
                value.copy_(state_dict[name])


class OptimizerInBackward(Optimizer):
    """Update each block as soon as its gradients are complete, then free the gradients.

    The update precedes the gradient norm, so gradients are never clipped. Each block has its own
    gate: a non-finite gradient skips the update of its block's local shard. A non-finite loss makes
    every gradient non-finite (see train.py) and skips the update on every rank.
    """

    is_atomic = False

    def _make(self, section: OptimizerSection) -> list[torch.optim.Optimizer]:
        self._skip_next: Tensor | None = None
        self._norms: dict[int, list[Tensor]] = {}
        blocks: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in self.named:
            blocks[block_of(name)].append((name, parameter))
        return [self._update_together(members, section) for members in blocks.values()]

    def _update_together(
        self, members: list[tuple[str, Tensor]], section: OptimizerSection
    ) -> torch.optim.Optimizer:
        """Build one optimizer that steps when all of its parameters have a gradient."""
        optimizer = _build(members, section)
        complete: list[Tensor] = []  # in backward order, in which the norms are summed

        def on_gradient(parameter: Tensor) -> None:
            grad: Any = parameter.grad
            if grad.is_cpu and torch.cuda.is_initialized():
                # The gradient is offloaded, and torch 2.11 does not wait for the copy.
                torch.cuda.current_stream().synchronize()
            complete.append(parameter)
            if len(complete) == len(members):
                self._update(optimizer, complete)
                complete.clear()

        for _, parameter in members:
            parameter.register_post_accumulate_grad_hook(on_gradient)
        return optimizer

    def _update(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        all_norms = []
        for copies, grads in local_gradients(parameters).items():
            norms = local_norms(grads)
            self._norms.setdefault(copies, []).extend(norms)
            all_norms += norms
        skip = (torch.stack(all_norms).sum() * 0).ne(0).float()  # 0 * norm is 0 if finite, else NaN
        if self._skip_next is not None:
            skip = torch.maximum(skip, self._skip_next)
        _gated_step(optimizer, skip)
        for parameter in parameters:
            parameter.grad = None

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return the norm of the applied gradients. `max_norm` has no effect; preflight warns.

        Raises RuntimeError if a block still waits for a gradient, because it was not updated.
        """
        waiting = {block_of(name) for name, parameter in self.named if parameter.grad is not None}
        self._refuse_missing(
            name for name, p in self.named if p.grad is None and block_of(name) in waiting
        )
        norms, self._norms = self._norms, {}
        return global_norm(sum_of_squares(norms), self.all_ranks)

    def step(self, skip: Tensor) -> None:
        """Apply `skip` to all later gradients. The weights are updated already."""
        self._skip_next = skip


def block_of(name: str) -> str:
    """Return a parameter's block, such as `layers.3` of `layers.3.attention.wq.weight`.

    Outside of a list of layers, the block is the first module: `output` of `output.weight`.
    """
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    return f"{first}.{second}" if second.isdigit() else first


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    section: OptimizerSection,
    all_ranks: ProcessGroup | None = None,
) -> Optimizer:
    """Build the optimizer of `[optimizer]`.

    named_parameters: canonical names; tied parameters appear once.
    all_ranks: the group of all ranks of the run, for the gradient norm. None for one rank.
    """
    kind = OptimizerInBackward if section.early_step_in_backward else Optimizer
    return kind(named_parameters, section, all_ranks)
