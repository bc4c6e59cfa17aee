"""One collective for all weights of a block, in the graphs of a compiled SimpleFSDP model (arXiv:2411.00284, section 4).

`simple_fsdp.py` gathers and reduces weight by weight. Here what the weights of one block send alike (kind, ranks, dtype) is
joined: laid side by side, sent once, taken apart. Numbers do not change, nor do bytes; what each collective costs besides its
bytes is paid once for each block. A graph in which nothing could be joined is an error: else nobody would notice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import fx

_ops = torch.ops._c10d_functional
GATHER, SCATTER, REDUCE = (
    _ops.all_gather_into_tensor.default,
    _ops.reduce_scatter_tensor.default,
    _ops.all_reduce.default,
)


class _Sent(NamedTuple):
    """What collectives must have in common to be sent as one."""

    block: str
    kind: Any
    dtype: torch.dtype
    settings: tuple[Any, ...]  # of the operator: reduction, number of ranks, name of the group


def bucketing_backend(
    backend: str, blocks: Collection[str], groups: Collection[str], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """`backend` ("inductor", which takes options, or "aot_eager") of torch.compile, with `merge_collectives` on each of its
    graphs.
    """
    if backend == "inductor":
        return _inductor(tuple(blocks), tuple(groups), options or {})
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def lower(module: fx.GraphModule, inputs: Any) -> Any:
        merge_collectives(module.graph, blocks, groups)
        module.recompile()
        return make_boxed_func(module.forward)

    merging: Callable[..., Any] = aot_autograd(
        fw_compiler=lower,
        bw_compiler=lower,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return merging


def merge_collectives(graph: fx.Graph, blocks: Collection[str], groups: Collection[str]) -> int:
    """Join, in place, the collectives over `groups` (names) within each of `blocks` (fqns); returns how many it saved.

    Gathers move to where the first of them stands, reductions to where the last does. Raises RuntimeError where there are some
    and none could be joined, or where one of a block's collectives needs the result of another.
    """
    buckets: dict[_Sent, list[fx.Node]] = {}
    num_before = num_saved = 0
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (GATHER, SCATTER, REDUCE) and node.args[-1] in groups:
            num_before += 1
            block = _block_of(node, blocks)
            if block is not None:
                sent = _Sent(block, node.target, _input(node).meta["val"].dtype, tuple(node.args[1:]))
                buckets.setdefault(sent, []).append(node)
    if not num_before:
        return 0
    place = {node: (i, 0) for i, node in enumerate(graph.nodes)}
    for sent, nodes in buckets.items():
        if len(nodes) > 1:
            _merge(graph, sent.kind, nodes, place)
            num_saved += len(nodes) - 1
    if not num_saved:
        raise RuntimeError(
            f"parallelism.simple_fsdp_bucketing: of {num_before} collectives in a compiled graph none belong together by the "
            f"names of the blocks ({', '.join(blocks)}); set it to false"
        )
    _sort(graph, place)
    return num_saved


def _block_of(node: fx.Node, blocks: Collection[str]) -> str | None:
    """The block whose weight a collective is for: in backward as in forward, by where the weight was read."""
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        fqn = path.removeprefix("L['self'].")
        for block in blocks:
            if fqn == block or fqn.startswith(f"{block}."):
                return block
    return None


def _input(collective: fx.Node) -> fx.Node:
    return collective.all_input_nodes[0]


def _merge(graph: fx.Graph, kind: Any, nodes: list[fx.Node], place: dict[fx.Node, tuple[int, int]]) -> None:
    """Put one collective in the place of several. Each is (ranks, own) in what it sends or what arrives."""
    at = place[nodes[0] if kind is GATHER else nodes[-1]]
    settings = nodes[0].args[1:]
    num_ranks = 1 if kind is REDUCE else next(arg for arg in settings if isinstance(arg, int))
    rows_sent, rows_arrived = {GATHER: (1, num_ranks), SCATTER: (num_ranks, 1), REDUCE: (1, 1)}[kind]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        new.meta.update({"val": target(*values[0], **values[1]), "nn_module_stack": nodes[0].meta["nn_module_stack"]})
        place[new] = (at[0], 1 + len(place))
        return new

    sizes = [_input(node).meta["val"].numel() // rows_sent for node in nodes]
    flat = [call(torch.ops.aten.reshape.default, _input(node), [rows_sent, size])
            for node, size in zip(nodes, sizes, strict=True)]  # fmt: skip
    joined = call(torch.ops.aten.reshape.default, call(torch.ops.aten.cat.default, flat, 1), [-1])
    arrived = call(_ops.wait_tensor.default, call(kind, joined, *settings))
    side_by_side = call(torch.ops.aten.reshape.default, arrived, [rows_arrived, sum(sizes)])
    first = 0
    for node, size in zip(nodes, sizes, strict=True):
        part = call(torch.ops.aten.slice.Tensor, side_by_side, 1, first, first + size)
        own = call(torch.ops.aten.clone.default, part, memory_format=torch.contiguous_format)
        whole = call(torch.ops.aten.reshape.default, own, list(node.meta["val"].shape))
        for wait in list(node.users):
            wait.replace_all_uses_with(whole)
            graph.erase_node(wait)
        graph.erase_node(node)
        first += size


def _sort(graph: fx.Graph, place: dict[fx.Node, tuple[int, int]]) -> None:
    """Every node after what it needs, and else in the order of `place`."""
    nodes = list(graph.nodes)
    missing = {node: len(set(node.all_input_nodes)) for node in nodes}
    ready = [(place[node], i) for i, node in enumerate(nodes) if not missing[node]]
    heapq.heapify(ready)
    index = {node: i for i, node in enumerate(nodes)}
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (place[user], index[user]))
    if len(order) < len(nodes):
        raise RuntimeError("a collective of a block needs the result of another one that it would be joined with")
    for node in order:
        graph._root.prepend(node)  # to the end
    graph.lint()


def _inductor(blocks: tuple[str, ...], groups: tuple[str, ...], options: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        """Inductor keeps compiled graphs between runs under a name that this one's is part of."""

        def __call__(self, graph: fx.Graph) -> None:
            merge_collectives(graph, blocks, groups)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), repr((blocks, groups)))

    patches = {"post_grad_custom_pre_pass": Pass(), **options}
    return lambda graph, inputs: compile_fx(graph, inputs, config_patches=patches)
