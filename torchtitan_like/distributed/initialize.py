"""Initial weights that do not depend on the topology.

An element's value depends only on the seed, the parameter's name, and the element's index in the
full parameter. So each rank computes exactly its own elements, without communication.

The generator is counter-based (splitmix64), followed by the inverse CDF of the normal distribution.
Both use only operations that IEEE 754 defines to the last bit (+ - * / sqrt, and integers), each in
a kernel of its own: a fused product and sum rounds once instead of twice. So the weights are equal
for any device, number of threads, CPU capability, and torch version. (The results of `normal_` and
`torch.special.ndtri` are not.) None of this may be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan_like.models.spec import unscaled
from torchtitan_like.util.shards import local_positions
from torchtitan_like.util.splitmix import SIGNED_GAMMA, scramble, scramble_tensor, tensor_key

if TYPE_CHECKING:
    from torchtitan_like.models.spec import InitRule, ScaleOf

InitTable = tuple[tuple[str, "InitRule"], ...]

# Elements drawn at a time. On a CPU temporaries fit into a core's cache; elsewhere they take up to
# 0.6 GiB.
BLOCK = 32_768
DEVICE_BLOCK = 2**22


def materialize(model: Any, device: torch.device) -> None:
    """Allocate uninitialized memory on `device` for a model built on meta, in place.

    Tied parameters stay tied, and buffers are computed.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda tensor: _empty(tensor, device))
    # `_apply` has made separate tensors of tied parameters.
    for (first, name), *others in owners.values():
        for module, alias in others:
            module._parameters[alias] = first._parameters[name]
    model.init_buffers(device)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """As `torch.empty_like`, which for a plain meta tensor imports 500 modules of torch's compiler."""
    if _is_dtensor(tensor):
        return torch.empty_like(tensor, device=device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@torch.no_grad()
def initialize(
    model: nn.Module, init_table: InitTable, seed: int, scale_of: ScaleOf = unscaled
) -> None:
    """Fill each parameter by the first row of `init_table` (fnmatch pattern, rule) that matches.

    scale_of: `ModelSpec.scale`, whose `std` multiplies the values.
    Parameters may be tensors or DTensors, on any device, of any floating dtype. A tied parameter is
    filled once, under its first name. Raises ValueError naming the parameters that match no row.
    """
    rules = {name: _find_rule(init_table, name) for name, _ in model.named_parameters()}
    unmatched = [name for name, rule in rules.items() if rule is None]
    if unmatched:
        raise ValueError(
            f"no rule of the init table matches {unmatched}: add a (pattern, InitRule) row for them"
        )
    for name, parameter in model.named_parameters():
        rule = rules[name]
        assert rule is not None
        local, _ = _owned(parameter)
        factor = scale_of(name, parameter.ndim).std
        if rule.kind in ("zeros", "ones"):
            local.fill_(factor * (rule.kind == "ones"))
            continue
        rule = replace(rule, std=rule.std * factor)
        # Round to fp32 first: a bf16 model starts from the rounded weights of the fp32 model.
        key, dtype = tensor_key(seed, name), torch.promote_types(local.dtype, torch.float32)
        for states, block in _blocks(local, parameter, key, first=1):
            block.copy_(_draw(states, rule).to(dtype))


@torch.no_grad()
def weight_hash(model: nn.Module) -> int:
    """Return this rank's share of a 64-bit hash of all weights.

    The sum of all shares mod 2^64 is equal on every topology. It covers each element's name, index,
    and fp32 value once: of the replicas of a DTensor only the first counts. A plain tensor is
    assumed to exist on this rank only.
    """
    total = 0
    for name, parameter in model.named_parameters():
        local, counts = _owned(parameter)
        if not counts:
            continue
        key, share = tensor_key(0, name), torch.zeros((), dtype=torch.int64, device=local.device)
        for states, values in _blocks(local, parameter, key):
            bits = values.to(torch.float32).view(torch.int32).to(torch.int64)
            bits &= 0xFFFFFFFF
            share += _scramble(_scramble(states) + bits).sum()
        total += int(share)
    return total % 2**64


def _find_rule(init_table: InitTable, name: str) -> InitRule | None:
    return next((rule for pattern, rule in init_table if fnmatchcase(name, pattern)), None)


# ---- the elements of this rank


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def _owned(parameter: Any) -> tuple[Tensor, bool]:
    """Return the local tensor, and whether this rank is the first of its replicas."""
    local = parameter.detach()
    if not _is_dtensor(parameter):
        return _unwrapped(local), True
    coordinate, local = parameter.device_mesh.get_coordinate(), _unwrapped(local.to_local())
    if coordinate is None:
        return local, False
    replica_indices = [
        index
        for index, placement in zip(coordinate, parameter.placements, strict=True)
        if placement.is_replicate()
    ]
    return local, not any(replica_indices)


def _unwrapped(local: Any) -> Tensor:
    """Return the tensor inside torchao's wrapper of a weight that is gathered in float8."""
    inner: Tensor = getattr(local, "_tensor", local)
    return inner


def _global_index(parameter: Any) -> list[Tensor]:
    """For each dimension, return the indices in the full parameter of this rank's local positions.

    Raises ValueError if the result is not the local shape.
    """
    positions = local_positions(parameter)
    expected = tuple(len(indices) for indices in positions)
    actual = tuple(_owned(parameter)[0].shape)
    if expected != actual:
        raise ValueError(
            f"a parameter {tuple(parameter.shape)} placed as {parameter.placements} should have the "
            f"local shape {expected}, but has {actual}"
        )
    return positions


def _blocks(
    local: Tensor, parameter: Tensor, key: int, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (states of splitmix64, int64; view of `local`), some elements at a time.

    The state of an element is key + (first + its index in the flattened full parameter) gamma.
    """
    *leading, columns = (positions.to(local.device) for positions in _global_index(parameter))
    row_starts = torch.zeros(1, dtype=torch.int64, device=local.device)
    for size, positions in zip(parameter.shape, leading, strict=False):
        row_starts = (row_starts[:, None] * size + positions).flatten()
    row_states = (row_starts * parameter.shape[-1] + first).mul_(SIGNED_GAMMA).add_(key)
    column_states = columns * SIGNED_GAMMA
    rows = local.view(-1, local.shape[-1]) if local.numel() else local.new_empty(0, 1)
    block = BLOCK if local.is_cpu else DEVICE_BLOCK
    height, width = max(block // max(len(columns), 1), 1), max(min(block, len(columns)), 1)
    for top in range(0, rows.shape[0], height):
        for left in range(0, rows.shape[1], width):
            states = row_states[top : top + height, None] + column_states[left : left + width]
            yield states, rows[top : top + height, left : left + width]


# ---- random numbers


def _uses_numpy(tensor: Tensor) -> bool:
    """On a CPU numpy takes half of torch's time, and torch's `sqrt` is not correctly rounded there."""
    return tensor.is_cpu


def _scramble(values: Tensor) -> Tensor:
    """`scramble` for an int64 tensor, in place."""
    if not _uses_numpy(values):
        return scramble_tensor(values)
    scramble(values.numpy().view(np.uint64))
    return values


def _draw(states: Tensor, rule: InitRule) -> Tensor:
    """Return the value of each element in float64. Changes `states`."""
    bits = _scramble(states)
    # 52 bits plus a half: with 53 bits the half is lost above 0.5, and the largest value becomes 1.
    uniform = (bits >> 12).bitwise_and_(2**52 - 1).to(torch.float64).add_(0.5).mul_(2.0**-52)
    if rule.kind == "trunc_normal":
        # Map to the CDF's range between the bounds, so that every draw is used. The range is
        # rounded inward to 40 bits: libm's last bits have no effect, and no value exceeds a bound.
        below = math.ceil(0.5 * math.erfc(rule.bound / math.sqrt(2.0)) * 2**40) * 2.0**-40
        uniform.mul_(1.0 - 2.0 * below).add_(below)
    values: Any = normal_quantile(uniform.numpy() if _uses_numpy(uniform) else uniform)
    values *= rule.std
    return torch.as_tensor(values)


# Wichura (1988), "Algorithm AS 241: The percentage points of the normal distribution", PPND16: 16
# digits.
_CENTER = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def normal_quantile(p: Any) -> Any:
    """Return z with P(standard normal < z) = p, for 0 < p < 1.

    p: float64, a tensor or an array of numpy, as the result.
    """
    q = p - 0.5
    z = _ratio(_CENTER, 0.180625 - q * q)
    z *= q
    library: Any = torch if isinstance(p, Tensor) else np
    outer = library.where(abs(q) > 0.425)
    tail = library.minimum(p[outer], 1.0 - p[outer])
    r = library.sqrt(-_log(tail, library))
    size = _ratio(_TAIL, r - 1.6)
    far = library.where(r > 5.0)
    size[far] = _ratio(_FAR_TAIL, r[far] - 5.0)
    z[outer] = library.copysign(size, q[outer])
    return z


def _ratio(coefficients: tuple[Iterable[float], Iterable[float]], x: Any) -> Any:
    above, below = (_polynomial(c, x) for c in coefficients)
    above /= below
    return above


def _polynomial(coefficients: Iterable[float], x: Any) -> Any:
    """Horner's rule, highest power first.

    Product and sum are rounded separately: a fused operation differs between machines.
    """
    first, second, *rest = coefficients
    total = first * x
    total += second
    for c in rest:
        total *= x
        total += c
    return total


def _log(x: Any, library: Any) -> Any:
    """Natural logarithm of normal numbers above 0, to 16 digits. Those of numpy and torch depend on
    the machine.

    x = m 2^e with 0.7 < m < 1.42; log m = 2 atanh(s) = 2 (s + s^3 / 3 + ...), s = (m - 1) / (m +
    1), |s| < 0.18.
    """
    m, e = library.frexp(x)
    is_small = m < math.sqrt(0.5)
    m = library.where(is_small, 2.0 * m, m)
    e = library.where(is_small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    series = _polynomial([1.0 / k for k in range(21, 0, -2)], s * s)
    exponent = e * library.ones_like(m)  # in float64
    return 2.0 * s * series + exponent * math.log(2.0)
