"""Dry-run a published TorchTitan run with what its code of that month did otherwise.

The planner describes this package's trainer. Published memory and speed were measured with the code
of their month. `DIFFERENCES` lists what that code did otherwise, with the change that is its source.
No number here is fitted to a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import torchtitan_like.build as build
import torchtitan_like.distributed.activation as activation
import torchtitan_like.distributed.data_parallel as data_parallel
import torchtitan_like.models.layers.attention as attention
import torchtitan_like.models.layers.decoder as decoder
import torchtitan_like.models.layers.norm as norm
from torchtitan_like.plan.record import Mark, Recording

Row = dict[str, str]


def checkpoint_settings(row: Row) -> dict[str, str]:
    """Return the settings of [activation_checkpoint] that TorchTitan's code of a row's month had.

    Its per-op list of saved results has had reduce_scatter_tensor since it exists (PR 97). Until it
    had a setting `early_stop` (PR 1580), the default of torch held, which is true.
    """
    stops_early = row["framework"] == "torchtitan" and row["date"] < "2025-09"
    return {
        "per_op_sac_save_reduce_scatter": "true",
        "early_stop": "true" if stops_early else "false",
    }


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _is_compiled(row: Row) -> bool:
    return row["compile"] == "1"


# ---- FSDP groups


def _options(mesh: Any, dims: Any, param_dtype: str, reduce_dtype: str) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = data_parallel.DTYPES
    return {
        "mesh": mesh["dp_replicate", "dp_shard"] if dims.dp_replicate > 1 else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(dtypes[param_dtype], dtypes[reduce_dtype]),
    }


def _with_head_in_root(
    model: Any,
    spec: Any,
    blocks: Any,
    mesh: Any,
    dims: Any,
    *,
    param_dtype: str,
    reduce_dtype: str,
    reshard: str,
    **_: Any,
) -> str:
    """Shard each block; embedding, norm and output are one group. The last block stays gathered."""
    from torch.distributed.fsdp import fully_shard

    options = _options(mesh, dims, param_dtype, reduce_dtype)
    blocks = list(blocks)
    for block in blocks:
        is_kept = dims.pp > 1 or block is blocks[-1]
        frees = reshard == "always" or (reshard == "default" and not is_kept)
        fully_shard(block, **options, reshard_after_forward=frees)
    fully_shard(model, **options, reshard_after_forward=dims.pp == 1)
    return "FSDP"


def _with_groups_of_their_own(
    model: Any,
    spec: Any,
    blocks: Any,
    mesh: Any,
    dims: Any,
    *,
    param_dtype: str,
    reduce_dtype: str,
    reshard: str,
    **_: Any,
) -> str:
    """Shard embedding, each block, and norm with output. The latter stay gathered."""
    from torch.distributed.fsdp import fully_shard

    options = _options(mesh, dims, param_dtype, reduce_dtype)
    frees = reshard == "always" or (reshard == "default" and dims.pp == 1)
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=frees)
    for block in blocks:
        fully_shard(block, **options, reshard_after_forward=frees)
    if model.norm is not None and model.output is not None:
        head = [model.norm, model.output]
        fully_shard(head, **options, reshard_after_forward=reshard == "always")
    fully_shard(model, **options)
    return "FSDP"


# ---- norms


# What a local variable holds is as long alive as in the original.


def _norm_of_torchtitan(self: Any, x: Tensor) -> Tensor:
    """RMSNorm in separate kernels: fp32 before the weight."""

    def normed(wide: Tensor) -> Tensor:
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)

    out: Tensor = normed(x.float()).type_as(x) * self.weight
    return out


def _norm_of_torch(self: Any, x: Tensor) -> Tensor:
    """RMSNorm in separate kernels: fp32 with the weight."""

    def weighted() -> Tensor:
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(self.eps))
        out: Tensor = wide * inverse_rms * self.weight
        return out

    return weighted().type_as(x)


@contextlib.contextmanager
def _norms(row: Row, function: Callable[[Any, Tensor], Tensor]) -> Iterator[None]:
    """Replace the norms that run in separate kernels: of compiled models, only the last one."""
    if not _is_compiled(row):
        with _replaced(norm.RMSNorm, "forward", function):
            yield
        return
    num_blocks = 0  # that are running
    fused_norm, run_block = norm.RMSNorm.forward, decoder.DecoderBlock.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return fused_norm(self, x) if num_blocks else function(self, x)

    def block(self: Any, *args: Any) -> Tensor:
        nonlocal num_blocks
        num_blocks += 1
        try:
            return run_block(self, *args)
        finally:
            num_blocks -= 1

    with (
        _replaced(norm.RMSNorm, "forward", forward),
        _replaced(decoder.DecoderBlock, "forward", block),
    ):
        yield


# ---- attention


def _rotate_as_complex(
    self: Any, q: Tensor, k: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rotate heads (batch, seq, heads, head_dim) by complex products in fp32."""
    cos, _ = self.rotary.tables(q.shape[1], positions)
    angles = torch.view_as_complex(cos.unflatten(-1, (-1, 2)))  # only the shape counts
    complex_q = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)))
    complex_k = torch.view_as_complex(k.float().unflatten(-1, (-1, 2)))
    rotated_q = torch.view_as_real(complex_q * angles).flatten(3)
    rotated_k = torch.view_as_real(complex_k * angles).flatten(3)
    return rotated_q.type_as(q), rotated_k.type_as(k)


def _rotate_halves(
    self: Any, q: Tensor, k: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rotate heads (batch, seq, heads, head_dim) in their dtype, kernel by kernel."""
    cos, sin = (table.to(q.dtype) for table in self.rotary.tables(q.shape[1], positions))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)

    rotated_q, rotated_k = rotated(q), rotated(k)
    return rotated_q, rotated_k


def _rotation(row: Row) -> AbstractContextManager[None]:
    if not row["model"].startswith("qwen"):
        return _replaced(attention.Attention, "add_positions", _rotate_as_complex)
    if _is_compiled(row):
        return nullcontext()  # one kernel, as here
    return _replaced(attention.Attention, "add_positions", _rotate_halves)


def _attend(self: Any, x: Tensor, positions: Tensor | None = None, mask: Any = None) -> Tensor:
    """Attention whose keys and values are repeated for each query head."""
    batch, seq, _ = x.shape
    q, k, v = self.project(x)
    q, k = self.add_positions(q, k, positions)
    repeats = q.shape[2] // k.shape[2]
    if repeats > 1:
        k, v = (y.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3) for y in (k, v))
    y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
    out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
    return out


# ---- losses: hidden (tokens, dim), weight (vocab, dim), labels (tokens,) -> 0-dim sum


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


class _LossParallel(torch.autograd.Function):
    """The temporaries of torch.distributed.tensor.parallel.loss_parallel on fp32 logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        out = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(out)
        return out.amax(-1).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        picked = torch.zeros_like(x)
        return (picked + torch.exp(x)) * grad, None


class _CompiledCrossEntropy(torch.autograd.Function):
    """What Inductor keeps: logits and two numbers of each token. The gradient is one kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        largest = logits.amax(-1).float()
        ctx.save_for_backward(logits, largest, torch.empty_like(largest))
        return largest.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _full_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(hidden @ weight.t(), labels)


def _kept_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The caller, who holds the loss, also holds the fp32 logits until the backward has ended."""
    logits = (hidden @ weight.t()).float()
    loss: Any = _cross_entropy(logits, labels)
    loss.logits = logits.detach()
    return loss  # type: ignore[no-any-return]


def _loss_in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    losses = [
        _cross_entropy(some, wanted)
        for some, wanted in zip(logits.chunk(8), labels.chunk(8), strict=True)
    ]
    return torch.stack(losses).sum()


def _parallel_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = _LossParallel.apply((hidden @ weight.t()).float(), labels)
    return loss


def _compiled_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = _CompiledCrossEntropy.apply(hidden @ weight.t(), labels)
    return loss


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _loss(function: Loss) -> Callable[[Row], AbstractContextManager[None]]:
    return lambda row: _replaced(build, "chunked_cross_entropy", lambda *_, **__: function)


# ---- activation checkpointing


def _saves_absolute_values(row: Row) -> AbstractContextManager[None]:
    saved = (*activation.SAVED_OPS, "abs.default", "max.default")
    return _replaced(activation, "SAVED_OPS", saved)


# ---- the table


class Difference(NamedTuple):
    """What TorchTitan did otherwise in rows of the months `first` to `last`.

    source: PR of pytorch/torchtitan, unless it names another. applies: to which of these rows.
    """

    what: str
    first: str
    last: str
    source: str
    patch: Callable[[Row], AbstractContextManager[None]]
    applies: Callable[[Row], bool] = lambda row: True


ALWAYS = ("2024-03", "2026-12")


def _is_eager(row: Row) -> bool:
    return not _is_compiled(row)


def _is_eager_float8(row: Row) -> bool:
    return _is_eager(row) and row["precision"].startswith("fp8")


def _is_on_one_rank(row: Row) -> bool:
    """Whether a rank has the logits of the whole vocabulary."""
    return row["tp"] == "1" and "chunks" not in row["loss"]


DIFFERENCES = (
    Difference(
        "norm and output are in the root's FSDP group; the last block stays gathered",
        *("2024-03", "2025-07", "parallelize_llama.py at 004b314 and 0596be3"),
        lambda row: _replaced(data_parallel, "apply_data_parallel", _with_head_in_root),
    ),
    Difference(
        "embedding, and norm with output, are FSDP groups; the latter stays gathered",
        *("2025-08", "2026-12", "1094 (rebased for its merge on 2025-07-29)"),
        lambda row: _replaced(data_parallel, "apply_data_parallel", _with_groups_of_their_own),
    ),
    Difference(
        "RMSNorm in separate kernels, fp32 before the weight",
        *("2024-03", "2025-03", "norms.py at 026e23a"),
        lambda row: _norms(row, _norm_of_torchtitan),
    ),
    Difference(
        "RMSNorm in separate kernels, fp32 with the weight",
        *("2025-04", "2025-07", "985 (2025-03-19); fused since pytorch/pytorch 153666"),
        lambda row: _norms(row, _norm_of_torch),
    ),
    Difference(
        "rotation by complex numbers (Llama), or kernel by kernel in bf16 (Qwen3)",
        *(*ALWAYS, "models/llama/model.py at 0199cbc, apply_rotary_emb"),
        _rotation,
    ),
    Difference(
        "keys and values repeated for each query head",
        *(*ALWAYS, "models/llama/model.py at 0199cbc, repeat_kv"),
        lambda row: _replaced(attention.Attention, "forward", _attend),
    ),
    Difference(
        "the fp32 logits are alive during the backward",
        *("2024-03", "2024-06", "391 (2024-06-12) deletes them; the rows are older"),
        _loss(_kept_loss),
        _is_on_one_rank,
    ),
    Difference(
        "cross-entropy of all logits, in fp32",
        *("2024-07", "2025-03", "551, and train.py at 0011fb9"),
        _loss(_full_loss),
        _is_on_one_rank,
    ),
    Difference(
        "cross-entropy of all logits, in fp32; compiled with the model",
        *("2025-04", "2026-12", "1033 (2025-04-01)"),
        lambda row: _loss(_compiled_loss if _is_compiled(row) else _full_loss)(row),
        _is_on_one_rank,
    ),
    Difference(
        "cross-entropy of all logits, in 8 chunks",
        *("2025-03", "2025-03", "996"),
        _loss(_loss_in_chunks),
        lambda row: "8 chunks" in row["loss"],
    ),
    Difference(
        "temporaries of loss_parallel",
        *(*ALWAYS, "torch/distributed/tensor/parallel/loss.py of torch 2.13"),
        _loss(_parallel_loss),
        lambda row: row["tp"] != "1",
    ),
    Difference(
        "per-op AC saves absolute values (a compiled graph drops those that no backward reads)",
        *("2024-12", "2025-02", "701 until 820 (2025-02-04)"),
        _saves_absolute_values,
        _is_eager_float8,
    ),
)


def differences_of(row: Row) -> list[Difference]:
    """Return what the code of a TorchTitan row did otherwise."""
    if row["framework"] != "torchtitan":
        return []
    return [
        difference
        for difference in DIFFERENCES
        if difference.first <= row["date"] <= difference.last and difference.applies(row)
    ]


@contextlib.contextmanager
def code_of(row: Row) -> Iterator[None]:
    """Let dry runs compute and allocate as the code of a row did."""
    with contextlib.ExitStack() as stack:
        for difference in differences_of(row):
            stack.enter_context(difference.patch(row))
        yield


# ---- recordings


def with_states_in_first_update(recording: Recording) -> Recording:
    """Return the memory events with the optimizer's states made at the end of the first step.

    So torch.optim makes them, where this package makes them before the first step.
    """
    ends = {mark.name: mark.num_events for mark in recording.marks}
    model, optimizer, step = ends["model"], ends["optimizer"], ends["step 1"]
    events = recording.events
    moved = Recording()
    moved.streams, moved.categories, moved.work = (
        recording.streams,
        recording.categories,
        recording.work,
    )
    moved.events = [
        *events[:model],
        *events[optimizer:step],
        *events[model:optimizer],
        *events[step:],
    ]
    moved.marks = [
        Mark("model", model, 0),
        Mark("step 1", step - (optimizer - model), 0),
        Mark("optimizer", step, 0),
        *recording.marks[3:],
    ]
    return moved
