"""A device and peers that do not exist, on which the trainer's own code runs without computing.

The device "dryrun" is torch's extension device (PrivateUse1), so it works with any build of torch.
Its tensors are fake: they have shapes and storages without memory. Its streams and events write
every wait that FSDP2 issues into the recording. Collectives of the fake process group return at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torchtitan_like.distributed import row_exchange
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.schedule_view import Action
from torchtitan_like.distributed.world import HostGroup, PendingSum, World, build_device_groups
from torchtitan_like.models.layers import kernels
from torchtitan_like.plan.record import ActionSpan, Recorder, recording_in_place
from torchtitan_like.util import compile as compile_module

DEVICE_TYPE = "dryrun"


# ---- streams


class FakeStream:
    """A stream that orders work items of the recording."""

    def __init__(self, recorder: Recorder, index: int) -> None:
        self.index = index
        self._recorder = recorder

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._recorder)
        return event.record(self)

    def wait_event(self, event: FakeEvent) -> None:
        self._recorder.wait(self.index, event.item)

    def wait_stream(self, stream: FakeStream) -> None:
        self._recorder.wait(self.index, self._recorder.last_item(stream.index))

    def synchronize(self) -> None:
        """Return: the host never waits."""


class FakeEvent:
    """The position of a stream. item: the last work item before it; -1 for none."""

    def __init__(self, recorder: Recorder) -> None:
        self.item = -1
        self._recorder = recorder

    def record(self, stream: FakeStream | None = None) -> FakeEvent:
        index = self._recorder.stream if stream is None else stream.index
        self.item = self._recorder.last_item(index)
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        index = self._recorder.stream if stream is None else stream.index
        self._recorder.wait(index, self.item)

    def synchronize(self) -> None:
        """Return: the host never waits."""

    def query(self) -> bool:
        return True


class FakeDeviceModule:
    """What `torch.cuda` is for GPUs, for the device "dryrun"."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Outside of the fake mode, FSDP2 makes tensors without elements. They are the only real ones.
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("empty.memory_format", _empty, "PrivateUse1")
        # Torch divides an operator of a device without a kernel. GPUs have one for this operator.
        self._library.impl("silu_backward", _no_kernel, "PrivateUse1")
        self._streams = [FakeStream(recorder, recorder.stream)]

    def Stream(self, *args: Any, priority: int = 0, **kwargs: Any) -> FakeStream:
        index = self._recorder.add_stream(f"stream {len(self._streams)}")
        self._streams.append(FakeStream(self._recorder, index))
        return self._streams[-1]

    def Event(self, *args: Any, **kwargs: Any) -> FakeEvent:
        return FakeEvent(self._recorder)

    def current_stream(self, *args: Any) -> FakeStream:
        return self._streams[self._recorder.stream]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._recorder.stream = self._recorder.stream, stream.index
        try:
            yield
        finally:
            self._recorder.stream = before

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def set_device(self, device: Any) -> None:
        """Return: there is one device."""

    def synchronize(self, *args: Any) -> None:
        """Return: the host never waits."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *args: Any) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, *args: Any) -> None:
        """Return: nothing is drawn."""

    def manual_seed_all(self, seed: int) -> None:
        """Return: nothing is drawn."""

    def _is_in_bad_fork(self) -> bool:
        return False


def _empty(size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    if math.prod(size) > 0:
        raise NotImplementedError(
            f"a real tensor {tuple(size)} on the device {DEVICE_TYPE}, which has no memory: expected "
            "a fake one; allocate it within World.allocating"
        )
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())


def _no_kernel(*args: Any) -> Tensor:
    raise NotImplementedError(f"a kernel on the device {DEVICE_TYPE}. It runs on fake tensors only")


def register_device(recorder: Recorder) -> torch.device:
    """Make the device "dryrun" known to torch, for the rest of this process.

    Raises RuntimeError if torch's extension device is in use by another package.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=FakeDeviceModule(recorder))
    return torch.device(DEVICE_TYPE, 0)


# ---- kernels


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in half precision without a mask, else memory-efficient attention."""
    ops = torch.ops.aten
    is_flash = attn_mask is None and q.dtype in (torch.float16, torch.bfloat16)
    out: Tensor
    if is_flash and q.shape[-1] == v.shape[-1]:
        out = ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    else:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
        out = ops._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    return out


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    out: Tensor = _FusedRMSNorm.apply(x, weight)
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """One kernel forward and one backward, which save the input and 1/rms in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y: Tensor
        y, inverse_rms = torch.ops.torchtitan_like.planned_rms_norm(x, weight)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, inverse_rms = ctx.saved_tensors
        d_x, d_weight = torch.ops.torchtitan_like.planned_rms_norm_backward(
            grad, x, weight, inverse_rms
        )
        return d_x, d_weight if weight is not None else None


@torch.library.custom_op("torchtitan_like::planned_rms_norm", mutates_args=())
def _planned_rms_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("planned_rms_norm has no kernel. It runs on fake tensors only")


@_planned_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("torchtitan_like::planned_rms_norm_backward", mutates_args=())
def _planned_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("planned_rms_norm has no kernel. It runs on fake tensors only")


@_planned_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    d_weight = x.new_empty(0) if weight is None else torch.empty_like(weight)
    return torch.empty_like(x), d_weight


# The kernels of a GPU for functions of torch. Torch chooses by device, and decomposes these
# functions on a device without kernels of its own.
_KERNELS: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}


@contextmanager
def _using_gpu_kernels() -> Iterator[None]:
    module: Any = F
    originals = {name: getattr(module, name) for name in _KERNELS}

    def choosing(kernel: Any, original: Any) -> Any:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            chosen = kernel if x.device.type == DEVICE_TYPE else original
            return chosen(x, *args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(module, name, choosing(_KERNELS[name], original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


# ---- kernels for masks at document borders

FLEX_BLOCK = 128  # queries, and keys, of a block of a `BlockMask`


def _whole_sequences(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """FlexAttention as causal attention: which blocks it skips depends on data, which is not here."""
    return kernels.causal_attention(q, k, v)


def _block_mask(
    positions: Tensor,
    dtype: torch.dtype,
    num_keys: int,
    *,
    window: int = 0,
    chunk: int = 0,
    has_sink: bool = False,
) -> list[Tensor]:
    """Return the tensors of a `BlockMask`: of full and of partial blocks, by queries and by keys."""
    batch, seq = positions.shape
    queries, keys = math.ceil(seq / FLEX_BLOCK), math.ceil((num_keys + has_sink) / FLEX_BLOCK)
    shapes = ((queries,), (queries, keys), (keys,), (keys, queries))
    return [
        positions.new_empty((batch, 1, *shape), dtype=torch.int32)
        for shape in shapes
        for _ in ("partial", "full")
    ]


def _documents(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """Flash attention over documents as causal attention over whole samples."""
    return kernels.causal_attention(q, *kernels.equal_heads(q, k, v))


def _borders(positions: Tensor, dtype: torch.dtype, num_keys: int) -> Tensor:
    """Return offsets as `document_borders`, of one document for each sample."""
    return positions.new_empty(positions.shape[0] + 1, dtype=torch.int32)


_MASKED = {
    "flex": kernels.Kernel(_whole_sequences, _block_mask),
    "varlen": kernels.Kernel(_documents, _borders),
}


@contextmanager
def _planning_masks() -> Iterator[None]:
    """Let models that are built attend without the data of their masks."""
    originals = dict(kernels.KERNELS)
    kernels.KERNELS.update(_MASKED)
    try:
        yield
    finally:
        kernels.KERNELS.update(originals)


# ---- experts


def _split_evenly(counts: Tensor, num_rows: int) -> list[list[int]]:
    """As `row_exchange.read_split_sizes`, if each rank sends as many rows to every rank.

    Each rank then receives as many rows as it sends.
    """
    torch.ops.torchtitan_like.copy_to_host(counts)  # a part of the run, without values here
    num_ranks = counts.shape[1]
    share, remainder = divmod(num_rows, num_ranks)
    sizes = [share + (rank < remainder) for rank in range(num_ranks)]
    return [sizes, sizes]


@contextmanager
def _routing_evenly() -> Iterator[None]:
    """Let expert-parallel ranks exchange equal numbers of rows."""
    module: Any = row_exchange
    original = module.read_split_sizes
    module.read_split_sizes = _split_evenly
    try:
        yield
    finally:
        module.read_split_sizes = original


@contextmanager
def _fusing_kernels(recorder: Recorder) -> Iterator[None]:
    """Record each call of a function that a GPU runs fused (`fused_on_gpu`) as one kernel."""
    module: Any = compile_module
    changes = {
        "_are_on_gpu": lambda args: True,
        "_can_compile": lambda: True,
        "_compiled": recorder.fused,
    }
    originals = {name: getattr(module, name) for name in changes}
    for name, change in changes.items():
        setattr(module, name, change)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


# ---- ranks


class MirrorGroup(HostGroup):
    """A group of hosts whose missing members have the values of this rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__([0], timedelta(0))
        self.size = size
        self._rank = rank
        self._others: Any = None

    @property
    def rank(self) -> int:
        return self._rank

    def sum_async(self, values: list[int]) -> PendingSum:
        return PendingSum(torch.tensor(values, dtype=torch.int64) * self.size, None)

    def gather(self, rows: Tensor) -> Tensor:
        return torch.stack([rows] * self.size)

    @contextmanager
    def gathering_from_others(self, value: Any) -> Iterator[None]:
        """Let `gather_objects` return this value for the missing members."""
        self._others = value
        try:
            yield
        finally:
            self._others = None

    def gather_objects(self, value: Any) -> list[Any]:
        others = value if self._others is None else self._others
        return [value] + [others] * (self.size - 1)

    def broadcast_object(self, value: Any) -> Any:
        return value


def join_fake_world(
    dims: ParallelDims,
    rank: int,
    device: torch.device,
    allocating: Callable[[], Any],
    *,
    needs_mesh: bool,
) -> World:
    """Return the world of one rank whose peers do not exist. Call it once per process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    timeout = timedelta(seconds=60)
    has_groups = dims.world_size > 1 or needs_mesh
    if has_groups:
        backends = ",".join(sorted({f"{kind}:fake" for kind in ("cpu", device.type)}))
        dist.init_process_group(
            backends, rank=rank, world_size=dims.world_size, store=FakeStore(), timeout=timeout
        )
    world = World(
        rank=rank,
        local_rank=0,
        dims=dims,
        device=device,
        mesh=None,
        experts_mesh=None,
        step_group=MirrorGroup(rank, dims.world_size),
        checkpoint_group=MirrorGroup(rank, dims.world_size),
        owns_default_group=has_groups,
        allocating=allocating,
    )
    if has_groups:
        ranks = list(range(dims.world_size))
        groups = build_device_groups(rank, dims, device.type, ranks=ranks, timeout=timeout)
        world.mesh = groups.mesh
        world.experts_mesh = groups.experts_mesh
        world.all_ranks = groups.all_ranks
        world.groups = groups.by_name
        world.neighbor_groups = groups.neighbors
    return world


class _Message:
    """A message in progress, which holds its tensor: gloo until it is deleted, NCCL until `wait`."""

    def __init__(self, recorder: Recorder, tensor: Tensor) -> None:
        self._recorder = recorder
        self._item = recorder.last_item(recorder.stream)
        self._tensor: Tensor | None = tensor

    def wait(self, *timeout: Any) -> bool:
        self._recorder.wait_for_collective(self._item)
        if self._tensor is not None and not self._tensor.is_cpu:
            self._tensor = None
        return True


@contextmanager
def _holding_messages(recorder: Recorder) -> Iterator[None]:
    """Let `isend` and `irecv` return messages that hold their tensors; fake ones hold nothing."""
    module: Any = dist.distributed_c10d
    package: Any = dist
    originals = {name: getattr(module, name) for name in ("isend", "irecv")}

    def holding(function: Any) -> Any:
        def start(tensor: Tensor, *args: Any, **kwargs: Any) -> _Message:
            function(tensor, *args, **kwargs)
            return _Message(recorder, tensor)

        return start

    for name, original in originals.items():
        setattr(module, name, holding(original))
        setattr(package, name, getattr(module, name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
            setattr(package, name, original)


# Methods of torch's pipeline stages, and the kinds of actions that they are.
_ACTIONS = {
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
}


@contextmanager
def _recording_actions(recorder: Recorder) -> Iterator[None]:
    """Record which work belongs to which action of a pipeline."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    base: Any = _PipelineStageBase
    originals = {name: getattr(base, name) for name in _ACTIONS}

    def recording(name: str, original: Any) -> Any:
        def call(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            kind = _ACTIONS[name]
            if kind == "B" and not kwargs.get("full_backward", True):
                kind = "I"
            work = recorder.recording.work
            start = len(work)
            result = original(stage, chunk, *args, **kwargs)
            span = ActionSpan(Action(stage.stage_index, kind, chunk), start, len(work))
            recorder.recording.actions.append(span)
            return result

        return call

    for name, original in originals.items():
        setattr(base, name, recording(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(base, name, original)


def _grouped_mm_shape(first: Tensor, second: Tensor, offs: Tensor, *rest: Any) -> tuple[int, ...]:
    """(rows, k) and (groups, k, n), or (m, rows) and (rows, n), which are summed by group."""
    groups = offs.shape if second.dim() == 2 else ()
    return (*groups, first.shape[0], second.shape[-1])


class _FakeMode(FakeTensorMode):
    """Constants of `torch.tensor` never reach the device. Page-locked memory is a copy."""

    avoid_device_init = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._pin_memory.default:  # torch has no fake implementation
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], {}
        elif func is torch.ops.aten._grouped_mm.default:  # torch's accepts only bfloat16
            shape = _grouped_mm_shape(*args, **kwargs or {})
            func, args, kwargs = torch.ops.aten.new_empty.default, (args[0], shape), {}
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def faking(recorder: Recorder, *, fuses: bool) -> Iterator[Callable[[], Any]]:
    """Yield the context in which tensors are fake, kernels are a GPU's, and both are recorded.

    fuses: record calls of fused functions as one kernel.
    """
    fake_mode = _FakeMode(allow_non_fake_inputs=True)

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(fake_mode)
            stack.enter_context(recorder)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    with ExitStack() as stack:
        stack.enter_context(recording_in_place(recorder))
        stack.enter_context(_holding_messages(recorder))
        stack.enter_context(_recording_actions(recorder))
        stack.enter_context(_using_gpu_kernels())
        stack.enter_context(_planning_masks())
        stack.enter_context(_routing_evenly())
        if fuses:
            stack.enter_context(_fusing_kernels(recorder))
        yield enter
