"""Backends of torch.compile in torch 2.13, by capability."""

from __future__ import annotations

# This list omits the backends of torch's own tests, "ts" and "aot_ts" (TorchScript), and
# "aot_eager_decomp_partition_with_mode" (needs an argument).
BACKENDS = (
    "inductor",
    "aot_eager",
    "eager",
    "aot_eager_decomp_partition",
    "aot_eager_default_partitioner",
    "cudagraphs",
    "eager_debug",
    "eager_noexcept",
    "invoke_subgraph",
    "openxla",
    "openxla_eval",
    "pre_dispatch_eager",
    "tvm",
)
# Backends outside torch, and the package that torch imports for each at the first step.
PACKAGE_OF_BACKEND = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
# With these backends, autograd keeps all activations for the backward pass.
KEEPING_ALL = (
    "eager",
    "aot_eager_default_partitioner",
    "eager_debug",
    "eager_noexcept",
    "pre_dispatch_eager",
)
# Backends whose graphs can be rewritten before they are compiled.
GRAPH_BACKENDS = ("inductor", "aot_eager")
