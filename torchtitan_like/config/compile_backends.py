"""Backends of torch.compile (torch 2.13), by what they can do."""

from __future__ import annotations

# Left out: backends that only torch's own tests use, and those that cannot compile a current model: "ts" and "aot_ts"
# (TorchScript), "aot_eager_decomp_partition_with_mode" (needs an argument).
BACKENDS = (
    "inductor", "aot_eager", "eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner", "cudagraphs",
    "eager_debug", "eager_noexcept", "invoke_subgraph", "openxla", "openxla_eval", "pre_dispatch_eager", "tvm",
)  # fmt: skip
# The package that torch imports at the first step for a backend outside torch.
PACKAGE_OF_BACKEND = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
# Backends that leave it to autograd to keep activations for the backward pass: it keeps all.
KEEPING_ALL = ("eager", "aot_eager_default_partitioner", "eager_debug", "eager_noexcept", "pre_dispatch_eager")
# Backends whose graphs can be rewritten before they are compiled.
GRAPH_BACKENDS = ("inductor", "aot_eager")
