"""Merge the collectives of each block in compiled SimpleFSDP graphs (arXiv:2411.00284, section 4).

`simple_fsdp.py` gathers and reduces weight by weight. Here the collectives of one block with equal
kind, ranks, and dtype become one: concatenate, communicate, split. Results and bytes do not change;
the latency of a collective is paid once per block. A graph in which nothing can be merged is an
error, because it would otherwise go unnoticed.
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


class _BucketKey(NamedTuple):
    """Properties that collectives must share to be merged."""

    block: str
    kind: Any
    dtype: torch.dtype
    settings: tuple[Any, ...]  # of the operator: reduction, number of ranks, name of the group


def bucketing_backend(
    backend: str,
    blocks: Collection[str],
    groups: Collection[str],
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a torch.compile backend that applies `merge_collectives` to each graph.

    backend: "inductor", which takes options, or "aot_eager".
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
    """Merge the collectives over `groups` (names) within each of `blocks` (fqns), in place.

    A merged gather is at the position of the first one, a merged reduction at the position of the
    last one. Returns how many collectives were saved. Raises RuntimeError if there are collectives
    but none can be merged, or if one of a block's collectives needs the result of another.
    """
    buckets: dict[_BucketKey, list[fx.Node]] = {}
    num_before = num_saved = 0
    for node in graph.nodes:
        is_collective = node.op == "call_function" and node.target in (GATHER, SCATTER, REDUCE)
        if is_collective and node.args[-1] in groups:
            num_before += 1
            block = _block_of(node, blocks)
            if block is not None:
                dtype = _input(node).meta["val"].dtype
                key = _BucketKey(block, node.target, dtype, tuple(node.args[1:]))
                buckets.setdefault(key, []).append(node)
    if not num_before:
        return 0
    order = {node: (i, 0) for i, node in enumerate(graph.nodes)}
    for key, nodes in buckets.items():
        if len(nodes) > 1:
            _merge(graph, key.kind, nodes, order)
            num_saved += len(nodes) - 1
    if not num_saved:
        raise RuntimeError(
            f"parallelism.simple_fsdp_bucketing: none of {num_before} collectives in a compiled graph "
            f"could be merged. Expected several in one of the blocks ({', '.join(blocks)}); set it to "
            "false"
        )
    _sort(graph, order)
    return num_saved


def _block_of(node: fx.Node, blocks: Collection[str]) -> str | None:
    """Return the block that reads the weight of a collective, in forward and backward."""
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        fqn = path.removeprefix("L['self'].")
        for block in blocks:
            if fqn == block or fqn.startswith(f"{block}."):
                return block
    return None


def _input(collective: fx.Node) -> fx.Node:
    return collective.all_input_nodes[0]


def _merge(
    graph: fx.Graph, kind: Any, nodes: list[fx.Node], order: dict[fx.Node, tuple[int, int]]
) -> None:
    """Replace several collectives by one. Inputs or outputs are viewed as (ranks, elements each)."""
    position = order[nodes[0] if kind is GATHER else nodes[-1]]
    settings = nodes[0].args[1:]
    num_ranks = 1 if kind is REDUCE else next(arg for arg in settings if isinstance(arg, int))
    rows_sent, rows_arrived = {GATHER: (1, num_ranks), SCATTER: (num_ranks, 1), REDUCE: (1, 1)}[
        kind
    ]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        stack = nodes[0].meta["nn_module_stack"]
        new.meta.update({"val": target(*values[0], **values[1]), "nn_module_stack": stack})
        order[new] = (position[0], 1 + len(order))
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
        output = call(torch.ops.aten.reshape.default, own, list(node.meta["val"].shape))
        for wait in list(node.users):
            wait.replace_all_uses_with(output)
            graph.erase_node(wait)
        graph.erase_node(node)
        first += size


def _sort(graph: fx.Graph, order: dict[fx.Node, tuple[int, int]]) -> None:
    """Sort the nodes topologically, ties by `order`."""
    nodes = list(graph.nodes)
    missing = {node: len(set(node.all_input_nodes)) for node in nodes}
    ready = [(order[node], i) for i, node in enumerate(nodes) if not missing[node]]
    heapq.heapify(ready)
    index = {node: i for i, node in enumerate(nodes)}
    result: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        result.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (order[user], index[user]))
    if len(result) < len(nodes):
        raise RuntimeError(
            "parallelism.simple_fsdp_bucketing: a collective of a block needs the result of another one "
            "that it would be merged with; set it to false"
        )
    for node in result:
        graph._root.prepend(node)  # moves the node to the end
    graph.lint()


def _inductor(
    blocks: tuple[str, ...], groups: tuple[str, ...], options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        """Graph pass whose `uuid` is part of the key of Inductor's cache of compiled graphs."""

        def __call__(self, graph: fx.Graph) -> None:
            merge_collectives(graph, blocks, groups)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), repr((blocks, groups)))

    patches = {"post_grad_custom_pre_pass": Pass(), **options}
    return lambda graph, inputs: compile_fx(graph, inputs, config_patches=patches)
