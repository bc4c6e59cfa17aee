"""Record what a rank allocates and computes: memory events and work items.

`Recorder` is a dispatch mode. It sees each operator that autograd and the modules call, on real
tensors as well as on fake ones, and writes a `Recording`. So the same code measures a run on CPU
ranks and a dry run on a device that does not exist.

The schema of a `Recording`
---------------------------
Memory. `events` is the list of allocations (`Alloc`) and frees (`Free`) of storages in order. An
allocation has the bytes of its storage, and the stream on which it was made, from whose pool a
caching allocator takes the block. Views allocate nothing. A kernel's own workspace is an
allocation that is freed by the next event.

Work. `work` is the list of `WorkItem` in the order in which the host issues them:

| kind | what it is | fields with a meaning |
| --- | --- | --- |
| `matmul` | a matrix product | flops, shapes, dtype, num_bytes |
| `attention` | a fused attention kernel | flops (of the whole square), is_causal, shapes |
| `memory` | any other kernel, limited by bandwidth | num_bytes |
| `copy` | a copy between host and device; the host waits for `copy_to_host` | num_bytes |
| `collective` | a collective or a message | num_bytes, group, is_async |
| `wait` | a stream waits for another stream | waits_for |

Items of one stream run in order. A `wait` holds its stream until the item `waits_for` and all items
before it on that item's stream are done. A collective with `is_async` runs next to its stream, on
the lane of its process group: work that reads what it `writes` runs after it. Otherwise its stream
continues when it is done. `reads` and `writes` name storages by the `id` of their `Alloc`, so that
kernels can be fused: what is allocated and freed between two matrix products need not be written.

Marks. `marks` names positions in both lists: `model`, `optimizer`, `step 1`, ... are the ends of
these phases. `actions` are the parts of a pipeline's step, in order: which work each of them is.
`micro_batches` are the positions in `work` at which micro-batches begin; with a pipeline, steps.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchtitan_like.distributed.schedule_view import Action

Kind = Literal["matmul", "attention", "memory", "copy", "collective", "wait"]
Category = Literal[
    "parameters",
    "gathered parameters",
    "gradients",
    "optimizer",
    "activations",
    "activation gradients",
    "logits and loss",
    "communication buffers",
    "workspaces",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
Pass = Literal["forward", "backward", "recomputation", "update"]

COMPUTE = 0  # the stream of the model's own kernels


# Called with a phase, what is done, the total, and seconds since the phase began.
Progress = Callable[[str, int, int, float], None]


class Group(NamedTuple):
    """A process group. stride: distance of its first two ranks, 0 for one rank.

    dimension: of the mesh, as in `World.groups`; "" for groups of no single dimension.
    """

    name: str
    size: int
    stride: int
    dimension: str = ""


class WorkItem(NamedTuple):
    """One item of work; see the table at the top of the module.

    stream: index in `Recording.streams`. module: fqn of the module whose forward or backward it is.
    pass_: "recomputation" is the forward of a checkpointed block within the backward.
    flops: 2 for each multiplication with an addition. num_bytes: read and written; of a collective,
    the bytes of the largest tensor (gathered, reduced or scattered as a whole).
    shapes: of the operands. is_causal: of attention, which skips the masked half.
    promotes: of a float8 product that adds its partial sums in float32 (`use_fast_accum=False`).
    reads, writes: (id of the storage, bytes of the tensor).
    """

    kind: Kind
    op: str
    stream: int
    module: str
    pass_: Pass
    flops: int = 0
    num_bytes: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    group: Group | None = None
    is_async: bool = False
    is_causal: bool = False
    waits_for: int = -1
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    promotes: bool = False


class Alloc(NamedTuple):
    """An allocation. is_host: memory of the host, not of the device. at: number of work items so far."""

    id: int
    num_bytes: int
    stream: int
    category: Category
    op: str
    module: str
    pass_: Pass
    is_host: bool
    at: int


class Free(NamedTuple):
    """The end of allocation `id`. at: number of work items so far."""

    id: int
    at: int


class Mark(NamedTuple):
    """The end of a phase. num_events, num_work: lengths of both lists then."""

    name: str
    num_events: int
    num_work: int


class ActionSpan(NamedTuple):
    """An action of a pipeline. start, end: the number of work items before it and after it."""

    action: Action
    start: int
    end: int


class Recording:
    """The memory events and work items of one rank.

    streams: names; 0 is the stream of the model's kernels.
    categories: corrections of `Alloc.category` by id, known only after the allocation.
    """

    def __init__(self) -> None:
        self.events: list[Alloc | Free] = []
        self.work: list[WorkItem] = []
        self.marks: list[Mark] = []
        self.actions: list[ActionSpan] = []
        self.micro_batches: list[int] = []
        self.streams: list[str] = ["compute"]
        self.categories: dict[int, Category] = {}

    def category(self, alloc: Alloc) -> Category:
        """Return the category of an allocation."""
        return self.categories.get(alloc.id, alloc.category)

    def mark(self, name: str) -> None:
        """Record the end of a phase."""
        self.marks.append(Mark(name, len(self.events), len(self.work)))

    def between(self, start: str, end: str) -> list[WorkItem]:
        """Return the work after the mark `start` up to the mark `end`."""
        ends = {mark.name: mark.num_work for mark in self.marks}
        return self.work[ends[start] : ends[end]]


# Operators that allocate or rename memory and launch no kernel.
_NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "resize_",
    "set_",
    "record_stream",
    "is_same_size",
    "_local_scalar_dense",
    "barrier",
}
_COLLECTIVES = {"c10d", "_c10d_functional"}
_IGNORED = {"prim", "prims", "profiler"}


def _grouped_mm_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Rows times the matrix of their group: (rows, k) x (groups, k, n) or (m, rows) x (rows, n)."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


# FLOPs of operators that torch's counter does not know.
_MORE_FLOPS: Mapping[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        lambda q, k, v, *args, **kwargs: sdpa_flop_count(q.shape, k.shape, v.shape)
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda grad, q, k, v, *args, **kwargs: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    ),
    "_grouped_mm": _grouped_mm_flops,
}


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, which may be fewer than its storage's."""
    return tensor.numel() * tensor.element_size()


class _Operator(NamedTuple):
    """What is known of an operator before it is called.

    allocates: False if all results share the memory of arguments.
    is_composite: consists of calls of other operators, which are recorded in its place. Operators of
        tensor subclasses reach the recorder before they are divided into these.
    arguments: names.
    flops, workspace: functions of its arguments, or None.
    """

    name: str
    namespace: str
    allocates: bool
    launches: bool
    is_composite: bool
    arguments: tuple[str, ...]
    flops: Callable[..., int] | None
    workspace: Callable[..., int] | None


def _flash_backward_bytes(grad: Tensor, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the workspace of FlashAttention-2's backward.

    Gradients of q in fp32, with the sequence rounded up to 128; the row sums of out * grad; and,
    for shared keys, their gradients for each query head (flash_api.cpp, mha_bwd).
    """
    batch, heads, seq, head_dim = q.shape
    rounded = -(-seq // 128) * 128
    accumulated = batch * heads * rounded * (head_dim + 1) * 4
    expanded = 2 * batch * heads * k.shape[2] * head_dim * q.element_size()
    return accumulated + (expanded if k.shape[1] != heads else 0)


# Memory that kernels of a GPU take and return within one operator.
WORKSPACES: Mapping[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward_bytes,
}


def _describe(func: Any) -> _Operator:
    name, schema = func._overloadpacket.__name__, func._schema
    allocates = any(returned.alias_info is None for returned in schema.returns)
    is_view = not schema.is_mutable and len(schema.returns) > 0 and not allocates
    flops: Callable[..., int] | None = _MORE_FLOPS.get(name)
    if func._overloadpacket in flop_registry:
        counted = flop_registry[func._overloadpacket]

        def flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
            return int(counted(*args, out_val=out_val, **kwargs))

    launches = not is_view and name not in _NO_KERNEL
    return _Operator(
        name,
        func.namespace,
        allocates,
        launches,
        _is_composite(func.name()),
        tuple(argument.name for argument in schema.arguments),
        flops,
        WORKSPACES.get(name),
    )


def _is_composite(name: str) -> bool:
    """Return whether an operator is always divided. silu_backward, for one, also has kernels."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_kernel = any(has_kernel(name, key) for key in ("CPU", "CUDA", "Meta"))
    return has_kernel(name, "CompositeImplicitAutograd") and not is_kernel


def _flag(
    operator: _Operator, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool | None:
    """Return a boolean argument whose default is False; None if the operator does not have it."""
    if name not in operator.arguments:
        return None
    index = operator.arguments.index(name)
    return bool(args[index] if index < len(args) else kwargs.get(name, False))


class Recorder(TorchDispatchMode):
    """Writes a `Recording` of everything dispatched while it is active.

    device_type: of the memory that is counted as the device's; all other memory is the host's. On
        the CPU, that is all memory.
    matmul_workspace: bytes that each handle of the library for matrix products keeps. PyTorch has
        one for each stream of each thread; autograd runs the backward in a thread of its own.

    row_padding: rows of grouped matrix products / rows that the kernels compute.
    """

    def __init__(self, device_type: str, matmul_workspace: int = 0) -> None:
        super().__init__()
        self.recording = Recording()
        self.stream = COMPUTE
        self.num_muted = 0  # records nothing while above 0
        self.row_padding = 1.0
        self._device_type = device_type
        self._matmul_workspace = matmul_workspace
        self._matmul_handles: set[tuple[int, bool]] = set()  # (stream, is the autograd thread's)
        self._category: Category | None = None  # of all allocations
        self._is_update = False
        self._next_id = 0
        # Current allocation of each storage (0: none) and whether it is the host's, by address.
        self._live: dict[int, tuple[int, bool]] = {}
        self._operators: dict[Any, _Operator] = {}
        self._groups: dict[str, Group] = {}
        self._dimensions: dict[str, list[str]] = {}  # of process groups, by their names
        self._last_on_stream: dict[int, int] = {}
        # Collectives that have not been waited for, by the storage that they write.
        self._pending: dict[int, int] = {}
        self._names: dict[nn.Module, str] = {}
        self._heads: tuple[str, ...] = ()
        self._modules: list[str] = [""]
        # From which sequence number on autograd's nodes belong to which module.
        self._sequence: list[int] = [0]
        self._owners: list[str] = [""]

    # ---- phases and modules

    @contextmanager
    def allocating(self, category: Category) -> Iterator[None]:
        """Give all allocations this category."""
        before, self._category = self._category, category
        try:
            yield
        finally:
            self._category = before

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Record clipping, the optimizer's step and the average of the weights."""
        self._is_update = True
        try:
            with self.allocating("optimizer"):
                yield
        finally:
            self._is_update = False

    @contextmanager
    def following(self, parts: nn.ModuleList, heads: tuple[str, ...]) -> Iterator[None]:
        """Attribute work to the modules of a model. heads: fqns of modules that compute the loss."""
        self._names = {
            module: name for part in parts for name, module in part.named_modules() if name
        }
        self._heads = heads
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(module, self._modules[-1]))
        self._own_sequence()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()
        self._own_sequence()

    def _own_sequence(self) -> None:
        self._sequence.append(torch.autograd._get_sequence_nr())
        self._owners.append(self._modules[-1])

    def _position(self) -> tuple[str, Pass]:
        """Return the module and the pass to which the current operator belongs."""
        if self._is_update:
            return "", "update"
        if torch._C._current_graph_task_id() == -1:
            return self._modules[-1], "forward"
        if len(self._modules) > 1:  # a checkpointed block computes its forward again
            return self._modules[-1], "recomputation"
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return "", "backward"
        return self._owners[bisect_right(self._sequence, node._sequence_nr()) - 1], "backward"

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, whose calls are one kernel each: it reads its arguments once.

        Nothing of what it computes in between is in memory.
        """
        name = f"fused {function.__name__}"
        operator = _Operator(name, "", True, True, False, (), None, None)

        def call(*args: Any) -> Any:
            self.num_muted += 1
            out = function(*args)
            self.num_muted -= 1
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            for tensor in outputs:
                self._watch(tensor, operator.name)
            self._kernel(operator, args, {}, out, outputs)
            return out

        return call

    # ---- memory

    def id_of(self, tensor: Tensor) -> int:
        """Return the allocation of a tensor's storage; 0 if it was allocated before the recording."""
        return self._live.get(tensor.untyped_storage()._cdata, (0, False))[0]

    def assign(self, tensor: Any, category: Category) -> None:
        """Correct the category of a tensor's storage."""
        local = tensor.to_local() if hasattr(tensor, "placements") else tensor
        if allocation := self.id_of(local):
            self.recording.categories[allocation] = category

    def hold(self, num_bytes: int, op: str) -> int:
        """Record memory of a kernel or library, and return its id."""
        return self._allocate(num_bytes, op, False, "workspaces")

    def _watch(self, tensor: Tensor, op: str, category: Category | None = None) -> None:
        """Record the allocation of a tensor's storage, unless it is known."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        is_host = tensor.device.type != self._device_type
        self._live[key] = (self._allocate(storage.nbytes(), op, is_host, category), is_host)
        weakref.finalize(storage, self._release, key).atexit = False

    def _allocate(self, size: int, op: str, is_host: bool, category: Category | None) -> int:
        if size == 0:
            return 0
        self._next_id += 1
        module, pass_ = self._position()
        if category is None:
            category = self._category or self._guess(module, pass_)
        at = len(self.recording.work)
        self.recording.events.append(
            Alloc(self._next_id, size, self.stream, category, op, module, pass_, is_host, at)
        )
        return self._next_id

    def _guess(self, module: str, pass_: Pass) -> Category:
        if self.stream != COMPUTE:
            return "communication buffers"
        if module in self._heads:
            return "logits and loss"
        return "activation gradients" if pass_ == "backward" else "activations"

    def free(self, allocation: int) -> None:
        """Record the end of an allocation."""
        if allocation:
            self.recording.events.append(Free(allocation, len(self.recording.work)))

    def _release(self, key: int) -> None:
        self.free(self._live.pop(key)[0])

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Record that a storage changed its size in place, as FSDP2's gathered weights do.

        before: its bytes before.
        """
        key, size = storage._cdata, storage.nbytes()
        if self.num_muted or size == before or key not in self._live:
            return
        allocation, is_host = self._live[key]
        self.free(allocation)
        self._live[key] = (
            self._allocate(size, "resize_", is_host, "gathered parameters"),
            is_host,
        )

    # ---- work

    def issue(self, item: WorkItem) -> int:
        """Append an item, and return its index."""
        index = len(self.recording.work)
        self.recording.work.append(item)
        self._last_on_stream[item.stream] = index
        return index

    def last_item(self, stream: int) -> int:
        """Return the last item issued on a stream; -1 without one."""
        return self._last_on_stream.get(stream, -1)

    def wait(self, stream: int, item: int) -> None:
        """Let a stream wait for an item and all items before it on that item's stream."""
        if item >= 0 and self.recording.work[item].stream != stream:
            module, pass_ = self._position()
            self.issue(WorkItem("wait", "wait", stream, module, pass_, waits_for=item))

    def add_stream(self, name: str) -> int:
        """Return the index of a new stream."""
        self.recording.streams.append(name)
        return len(self.recording.streams) - 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # as fake tensors answer, which are asked most of all
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor calls the operators of its local tensors
        kwargs = kwargs or {}
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _describe(func)
        if operator.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._wait_for_result(args[0])
            return args[0]  # as the real operator does; a fake one allocates another tensor
        if self.num_muted or func.namespace in _IGNORED:
            return out
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if operator.namespace in _COLLECTIVES:
            self._collective(operator.name, args, kwargs, outputs)
            return out
        if operator.allocates:
            for tensor in outputs:
                self._watch(tensor, operator.name)
        if operator.launches:
            self._kernel(operator, args, kwargs, out, outputs)
        return out

    def _kernel(
        self,
        operator: _Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        outputs: list[Tensor],
    ) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tensors = {id(tensor): tensor for tensor in (*inputs, *outputs)}.values()
        devices = {tensor.device.type for tensor in tensors}
        if devices == {"cpu"} and self._device_type != "cpu":
            return  # the host's own work
        if not tensors:
            return
        flops = 0 if operator.flops is None else operator.flops(*args, **kwargs, out_val=out)
        if operator.name == "_grouped_mm":
            flops = round(flops / self.row_padding)
        kind: Kind = "memory"
        if flops:
            kind = "attention" if "attention" in operator.name else "matmul"
        elif len(devices) > 1 and "copy" in operator.name:
            kind = "copy"
        if kind == "matmul":
            self._open_matmul_handle()
        if operator.workspace is not None and self._device_type != "cpu":
            self.free(self.hold(operator.workspace(*args, **kwargs), operator.name))
        module, pass_ = self._position()
        self.issue(
            WorkItem(
                kind,
                operator.name,
                self.stream,
                module,
                pass_,
                flops=flops,
                num_bytes=sum(num_bytes(tensor) for tensor in tensors),
                shapes=tuple(tuple(tensor.shape) for tensor in inputs[:4]) if flops else (),
                is_causal=_flag(operator, "is_causal", args, kwargs) is True,
                dtype=str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
                reads=self._ids(inputs),
                writes=self._ids(outputs),
                promotes=_flag(operator, "use_fast_accum", args, kwargs) is False,
            )
        )
        if operator.name in ("chunk_cat", "_chunk_cat"):  # FSDP2 joins gradients to reduce them
            for tensor in inputs:
                if tensor is not kwargs.get("out") and self.id_of(tensor):
                    self.recording.categories.setdefault(self.id_of(tensor), "gradients")

    def _open_matmul_handle(self) -> None:
        handle = self.stream, torch._C._current_graph_task_id() != -1
        if handle not in self._matmul_handles:
            self._matmul_handles.add(handle)
            self.hold(self._matmul_workspace, "matmul handle")

    def _ids(self, tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
        return tuple((self.id_of(tensor), num_bytes(tensor)) for tensor in tensors)

    def _wait_for_result(self, result: Tensor) -> None:
        item = self._pending.pop(self.id_of(result), None)
        if item is not None:
            self.wait_for_collective(item)

    def wait_for_collective(self, item: int) -> None:
        """Let the current stream wait for an asynchronous collective or message."""
        module, pass_ = self._position()
        self.issue(WorkItem("wait", "wait", self.stream, module, pass_, waits_for=item))

    def _collective(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        if name == "barrier":
            return
        for tensor in outputs:
            self._watch(tensor, name, "communication buffers")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tensors = [*inputs, *outputs]
        is_functional = isinstance(args[-1], str) or name.endswith("_functional")
        module, pass_ = self._position()
        flags = [arg for arg in args if isinstance(arg, bool)]
        group = self._group(args)
        item = self.issue(
            WorkItem(
                "collective",
                name.strip("_"),
                self.stream,
                module,
                pass_,
                num_bytes=max(map(num_bytes, tensors)),
                dtype=str(tensors[-1].dtype).removeprefix("torch."),
                group=group._replace(dimension=self._dimension(group.name, name, is_functional)),
                is_async=is_functional or name in ("send", "recv_") or any(flags),
                reads=self._ids(inputs),
                writes=self._ids(outputs),
            )
        )
        if is_functional:
            self._pending[self.id_of(outputs[0])] = item

    def name_dimensions(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Let the recorder know the process groups of the mesh. groups: `World.groups`."""
        for name, group in groups.items():
            self._dimensions.setdefault(group.group_name, []).append(name)

    def _dimension(self, group: str, op: str, is_functional: bool) -> str:
        """Return the dimension to which a collective belongs. group: the name of its process group.

        Dimensions that have all ranks share the default group. Of its collectives, the all-to-alls
        belong to expert parallelism, and those of FSDP2, which alone are not functional, to "efsdp".
        """
        names = self._dimensions.get(group, [])
        if "ep" in names and op.startswith("all_to_all"):
            return "ep"
        if "efsdp" in names and not is_functional:
            return "efsdp"
        others = [name for name in names if name not in ("ep", "efsdp")]
        return (others or names or [""])[0]

    def _group(self, args: tuple[Any, ...]) -> Group:
        for arg in args:
            if isinstance(arg, dist.ProcessGroup):
                return self._describe_group(arg)
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                return self._describe_group(dist.ProcessGroup.unbox(arg))
        return self._describe_group(dist.distributed_c10d._resolve_process_group(args[-1]))

    def _describe_group(self, group: dist.ProcessGroup) -> Group:
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
            self._groups[name] = Group(name, len(ranks), stride)
        return self._groups[name]


class _Mute:
    """A context, which may be entered again, in which the recorder records nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.num_muted += 1

    def __exit__(self, *error: object) -> None:
        self._recorder.num_muted -= 1


@contextmanager
def recording_in_place(recorder: Recorder) -> Iterator[None]:
    """Let the recorder see what no dispatch mode sees, and ignore what is not part of the run.

    FSDP2 frees and allocates gathered weights by resizing their storages in place. DTensor finds
    the shape of each new result with fake tensors of the whole size.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize = torch.UntypedStorage.resize_

    def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, size)
        recorder.resized(storage, before)
        return result

    storages: Any = torch.UntypedStorage
    propagator: Any = ShardingPropagator
    lock = propagator._fake_mode_lock
    storages.resize_ = resize_and_record
    propagator._fake_mode_lock = _Mute(recorder)
    try:
        yield
    finally:
        storages.resize_ = resize
        propagator._fake_mode_lock = lock
