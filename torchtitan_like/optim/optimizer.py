"""Optimizers with eager state, flat state names, and updates gated on finite gradients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchtitan_like.extensions.protocols import Settings
from torchtitan_like.extensions.user_code import build_optimizer as build_own
from torchtitan_like.models.spec import ScaleOf, unscaled
from torchtitan_like.optim import elementwise
from torchtitan_like.optim.clipping import (
    clipping_divisor,
    divide_gradients,
    global_norm,
    gradient_norm,
    local_gradients,
    local_norms,
    sum_of_squares,
)
from torchtitan_like.optim.eight_bit import AdamW8bit
from torchtitan_like.optim.elementwise import GatedOptimizer, ShardIndices
from torchtitan_like.optim.groups import ParameterGroup, block_of, group_parameters
from torchtitan_like.optim.muon import FindMatrices, Muon
from torchtitan_like.util.shards import local_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from torchtitan_like.config.sections_training import Optimizer as OptimizerSection
    from torchtitan_like.models.hf_table import Table
    from torchtitan_like.util.plan_file import ModuleBytes

Tensor = torch.Tensor


class OptimizerContext(NamedTuple):
    """What optimizers read in addition to their parameters and settings.

    sharding: `ModelSpec.sharding`.
    find_matrices: `distributed.matrices.MatrixOwners` on the ranks of the run.
    shard_indices: `util.shards.local_positions`.
    device: of the parameters.
    seed: of the run.
    settings: the config sections of user code, by name.
    scale_of: `ModelSpec.scale`.
    """

    sharding: Table
    find_matrices: FindMatrices
    shard_indices: ShardIndices
    device: torch.device
    seed: int
    settings: Settings
    scale_of: ScaleOf = unscaled


Builder = Callable[
    [list[ParameterGroup], "OptimizerSection", OptimizerContext], torch.optim.Optimizer
]
# Name of an optimizer -> what builds it over groups of parameters. To add one, derive it from
# `GatedOptimizer`, and add its name to `config.sections_training.OptimizerName`. User code registers
# others.
OPTIMIZERS: dict[str, Builder] = {
    "Adam": lambda *arguments: _build_adam(elementwise.Adam, *arguments),
    "AdamW": lambda *arguments: _build_adam(elementwise.AdamW, *arguments),
    "AdamW8bit": lambda groups, section, context: AdamW8bit(
        groups, section, context.shard_indices, context.seed
    ),
    "Lion": lambda groups, section, context: elementwise.Lion(
        groups, section, context.shard_indices, context.seed
    ),
    "Muon": lambda groups, section, context: Muon(
        groups, section, context.find_matrices, context.device
    ),
}


def _build_adam(
    kind: type[elementwise.Adam],
    groups: list[ParameterGroup],
    section: OptimizerSection,
    context: OptimizerContext,
) -> torch.optim.Optimizer:
    """Build torch's Adam or AdamW, or `kind` if torch's has no such states or rounding."""
    if section.state_dtype is None and section.bf16_rounding == "nearest":
        return build_adam(groups, section)
    return kind(groups, section, context.shard_indices, context.seed)


def _build(
    named: Iterable[tuple[str, Tensor]], section: OptimizerSection, context: OptimizerContext
) -> list[torch.optim.Optimizer]:
    """Build one optimizer of torch for each name in use."""
    groups: dict[str, list[ParameterGroup]] = defaultdict(list)
    for group in group_parameters(named, section, context.sharding, context.scale_of):
        groups[group.optimizer].append(group)
    if "Muon" in section.names and not groups["Muon"]:
        # Its step is a collective, and this pipeline stage has no matrices.
        groups["Muon"].append(ParameterGroup("", "Muon", section.lr, 0.0, []))
    return [
        OPTIMIZERS[name](members, section, context)
        if name in OPTIMIZERS
        else build_own(name, [group.as_named() for group in members], context.settings)
        for name, members in groups.items()
    ]


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the kernel of a step divides by `grad_scale`, and does nothing at `found_inf`.

    torch's optimizers declare this to `torch.amp.GradScaler`.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _gated_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Step unless `skip` is 1. On a GPU, the host does not read `skip`."""
    if isinstance(optimizer, GatedOptimizer):
        optimizer.gated_step(skip)
    elif _is_fused(optimizer):
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    elif not skip.is_cpu:
        step_or_restore(optimizer, skip)
    elif not skip.item():
        optimizer.step()


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def step_or_restore(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Step, then restore all weights and states bitwise if `skip` is 1.

    For implementations without a gate. Needs memory for a copy of the weights and states. Integer
    multiplication by 0 or 1 selects the bits, which also removes NaN.
    """
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
            shard = local_shard(tensor)
            integer = INTEGERS[shard.element_size()]
            by_type[integer].append(shard.view(integer))
    old = {integer: torch._foreach_mul(bits, skip.to(integer)) for integer, bits in by_type.items()}
    optimizer.step()
    for integer, bits in by_type.items():
        torch._foreach_mul_(bits, (1 - skip).to(integer))
        torch._foreach_add_(bits, old[integer])


class Optimizer:
    """The optimizers of all named parameters. A step with `skip` = 1 changes no weight.

    The optimizers of this package read `skip` on the device, and so does torch's `fused`
    implementation of Adam. `foreach` and `for-loop` cannot: on a GPU, `step_or_restore` reverts
    their update; on the CPU, the host reads `skip`.

    The state contains only tensors. Hyperparameters come from the config and the schedule, never
    from a checkpoint. `is_atomic`: a step updates all weights of all ranks or none.
    `lr` is the learning rate of parameters in no group, `group_lr` the rate of each group by name.
    """

    is_atomic = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        section: OptimizerSection,
        all_ranks: ProcessGroup | None,
        context: OptimizerContext,
    ) -> None:
        self.all_ranks = all_ranks
        self.named = [(n, p) for n, p in named_parameters if p.requires_grad]
        self.lr: float = section.lr
        self.group_lr: dict[str, float] = {}
        self.peak_lr: float = section.lr
        self._peak_group_lr = {
            name: group.lr or section.lr for name, group in section.groups.items()
        }
        self._optimizers = self._make(section, context)

    def _make(
        self, section: OptimizerSection, context: OptimizerContext
    ) -> list[torch.optim.Optimizer]:
        return _build(self.named, section, context)

    @property
    def parameters(self) -> list[Tensor]:
        return [p for _, p in self.named]

    def scale_lr(self, factor: float) -> None:
        """Set the learning rates of the next update to `factor` times their peaks."""
        self.lr = self.peak_lr * factor
        self.group_lr = {name: peak * factor for name, peak in self._peak_group_lr.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip all gradients to a global norm of `max_norm`.

        Fused kernels clip in the next `step`, without another pass over the gradients. Returns the
        norm before clipping (0-dim, equal on every rank). Raises RuntimeError if a parameter has no
        gradient.
        """
        self._refuse_missing(name for name, parameter in self.named if parameter.grad is None)
        norm = gradient_norm(self.parameters, self.all_ranks)
        divisor = clipping_divisor(norm, max_norm)
        for optimizer in self._optimizers:
            if _is_fused(optimizer):
                optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            else:
                members = (p for group in optimizer.param_groups for p in group["params"])
                divide_gradients(members, divisor)
        return norm

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients of `named`, without copies.

        Raises RuntimeError if a parameter has no gradient.
        """
        self._refuse_missing(name for name, parameter in self.named if parameter.grad is None)
        return [local_shard(parameter.grad) for parameter in self.parameters]

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
        yield from ((name, state.get(p, {})) for name, p in self.named)

    def describe(self) -> list[str]:
        """Return lines for the log: who updates what, and the memory of one parameter.

        They count the elements of this rank's shards.
        """
        sizes: dict[str, list[tuple[Tensor, int]]] = defaultdict(list)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                place = f" (group {group['group']})" if group["group"] else ""
                title = (
                    f"{type(optimizer).__name__}{place}, peak lr {group['peak_lr']:.3g}, "
                    f"weight decay {group['weight_decay']:.3g}"
                )
                for p in group["params"]:
                    state = optimizer.state.get(p, {}).values()
                    sizes[title].append((p, sum(map(_num_bytes, state))))
        lines = []
        for title, members in sizes.items():
            num_elements = max(1, sum(local_shard(p).numel() for p, _ in members))
            state_bytes = sum(num_bytes for _, num_bytes in members) / num_elements
            weight_bytes = sum(_num_bytes(p) for p, _ in members) / num_elements
            lines.append(
                f"Optimizer: {title}: {len(members)} tensors, {num_elements:,} parameters on this "
                f"rank, {2 * weight_bytes + state_bytes:.2f} bytes per parameter (weight "
                f"{weight_bytes:.2f} + gradient {weight_bytes:.2f} + state {state_bytes:.2f})"
            )
        return lines

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


def kept_bytes(optimizer: Optimizer, averages: Mapping[str, Tensor]) -> ModuleBytes:
    """Return what this rank's shards keep in memory between steps.

    averages: averaged weights, by `average.<parameter>`. All layers count as one: the tensors of
    `layers.0.attention` to `layers.31.attention` belong to `layers.*.attention`.
    """
    weights = {f"weights.{name}": weight for name, weight in optimizer.named}
    modules: ModuleBytes = {}
    for name, tensor in {**weights, **optimizer.state_dict(), **averages}.items():
        kind, _, path = name.partition(".")
        parts = re.sub(r"\.\d+\.", ".*.", path).split(".")
        module = modules.setdefault(".".join(parts[:3] if "*" in parts else parts[:1]), {})
        module[kind] = module.get(kind, 0) + _num_bytes(tensor)
    return modules


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of this rank's shard."""
    shard = local_shard(tensor)
    return shard.numel() * shard.element_size()


class OptimizerInBackward(Optimizer):
    """Update each block as soon as its gradients are complete, then free the gradients.

    The update precedes the gradient norm, so gradients are never clipped. Each block has its own
    gate: a non-finite gradient skips the update of its block's local shard. A non-finite loss makes
    every gradient non-finite (see train.py) and skips the update on every rank.
    """

    is_atomic = False

    def _make(
        self, section: OptimizerSection, context: OptimizerContext
    ) -> list[torch.optim.Optimizer]:
        self._skip_next: Tensor | None = None
        self._norms: dict[int, list[Tensor]] = {}
        blocks: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in self.named:
            blocks[block_of(name)].append((name, parameter))
        return [
            optimizer
            for members in blocks.values()
            for optimizer in self._update_together(_build(members, section, context), members)
        ]

    def _update_together(
        self, optimizers: list[torch.optim.Optimizer], members: list[tuple[str, Tensor]]
    ) -> list[torch.optim.Optimizer]:
        """Let optimizers step when all of their parameters, `members`, have a gradient."""
        complete: list[Tensor] = []  # in backward order, in which the norms are summed

        def on_gradient(parameter: Tensor) -> None:
            grad: Any = parameter.grad
            if grad.is_cpu and torch.cuda.is_initialized():
                # The gradient is offloaded, and torch 2.11 does not wait for the copy.
                torch.cuda.current_stream().synchronize()
            complete.append(parameter)
            if len(complete) == len(members):
                self._update(optimizers, complete)
                complete.clear()

        for _, parameter in members:
            parameter.register_post_accumulate_grad_hook(on_gradient)
        return optimizers

    def _update(self, optimizers: list[torch.optim.Optimizer], parameters: list[Tensor]) -> None:
        all_norms = []
        for copies, grads in local_gradients(parameters).items():
            norms = local_norms(grads)
            self._norms.setdefault(copies, []).extend(norms)
            all_norms += norms
        skip = (torch.stack(all_norms).sum() * 0).ne(0).float()  # 0 * norm is 0 if finite, else NaN
        if self._skip_next is not None:
            skip = torch.maximum(skip, self._skip_next)
        for optimizer in optimizers:
            _gated_step(optimizer, skip)
        for parameter in parameters:
            parameter.grad = None

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Return the norm of the applied gradients. `max_norm` has no effect; the check warns.

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


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    section: OptimizerSection,
    context: OptimizerContext,
    all_ranks: ProcessGroup | None = None,
) -> Optimizer:
    """Build the optimizer of `[optimizer]`.

    named_parameters: canonical names; tied parameters appear once.
    all_ranks: the group of all ranks of the run, for the gradient norm. None for one rank.
    """
    kind = OptimizerInBackward if section.early_step_in_backward else Optimizer
    return kind(named_parameters, section, all_ranks, context)


def build_adam(groups: list[ParameterGroup], section: OptimizerSection) -> torch.optim.Optimizer:
    """Build Adam or AdamW (decoupled weight decay) over groups with the same optimizer."""
    kinds = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    fused = section.implementation == "fused"
    parameters = [p for group in groups for _, p in group.members]
    is_on_gpu = any(not p.is_cpu for p in parameters)
    optimizer: torch.optim.Optimizer = kinds[groups[0].optimizer](
        [group.as_torch() | {"eps": section.eps * group.eps_factor} for group in groups],
        betas=(section.beta1, section.beta2),
        fused=fused,
        foreach=section.implementation == "foreach",
        # Step counts are on the GPU, so that `step_or_restore` can revert them.
        capturable=is_on_gpu and not fused,
    )
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros(
                (), dtype=torch.float32, device=p.device if fused or is_on_gpu else "cpu"
            ),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer
