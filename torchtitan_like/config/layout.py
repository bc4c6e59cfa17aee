"""What a configuration and its surroundings say of a layout, for the rules that judge it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torchtitan_like.config.schema import JobConfig
    from torchtitan_like.config.sections_scale import Parallelism

# torch.distributed.pipelining refuses compiled modules under these (`_check_torch_compile_compatibility`).
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# Backends of torch.compile whose graphs can be rewritten before they are compiled.
GRAPH_BACKENDS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class Layout:
    """All that a rule may look at: a valid configuration, the ranks it runs on, the model's sizes, the hardware.

    world_size: None while the number of ranks is unknown; then dp_shard = -1 counts as 1, and `is_resolved` is False.
    limits: what the model demands of a layout (`ModelSpec.constraints`). args: its sizes; None where there is none.
    local_world_size: ranks of one machine, where that is known. device_type: None where it is not. splits_backward: a pipeline
    computes the gradients of inputs first and those of weights later. torch_release: the installed one's first two numbers.
    """

    config: JobConfig
    world_size: int | None = None
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    is_resolved: bool = False
    limits: Mapping[str, int] | None = None
    args: Any = None
    device_type: Literal["cpu", "cuda"] | None = None
    local_world_size: int | None = None
    splits_backward: bool = False
    torch_release: tuple[int, ...] = ()

    @property
    def parallelism(self) -> Parallelism:
        return self.config.parallelism

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharers(self) -> int:
        """Ranks that hold one weight, in pieces or whole; 0 where that is unknown."""
        return self.dp * self.cp if self.is_resolved else 0

    @property
    def uses_tensor_cores(self) -> bool:
        """True where matrix products may run on a GPU's tensor cores; unknown hardware counts."""
        is_half = self.config.training.mixed_precision_param == "bfloat16"
        return is_half and self.device_type != "cpu" and self.args is not None

    def width(self, *names: str) -> int:
        """The model argument of the first of these names that it has; 0 where it has none."""
        return next((int(getattr(self.args, one)) for one in names if hasattr(self.args, one)), 0)

    def size(self, name: str) -> int:
        """A size of the model; 0 where it is unknown."""
        return (self.limits or {}).get(name, 0)

    @property
    def compiles_model(self) -> bool:
        return self.config.compile.enable and "model" in self.config.compile.components

    @property
    def offloads_activations(self) -> bool:
        return self.config.activation_checkpoint.mode == "offload"

    @property
    def has_own_graph(self) -> bool:
        """True when all collectives of data parallelism are in a compiled graph that can be changed."""
        can_be_changed = self.config.compile.backend in GRAPH_BACKENDS
        return self.parallelism.data_parallel_impl == "simple_fsdp" and self.compiles_model and can_be_changed

    @property
    def unit(self) -> int:
        """Samples of one forward pass on all data-parallel ranks."""
        return self.config.training.local_batch_size * self.dp

    @property
    def tokens_of_a_product(self) -> int:
        """Rows of a matrix product: the tokens of one forward pass on one rank."""
        is_piped = self.pp > 1
        parallelism, training = self.parallelism, self.config.training
        samples = parallelism.pipeline_parallel_microbatch_size if is_piped else training.local_batch_size
        return samples * training.seq_len // self.pieces

    @property
    def num_accumulated(self) -> int:
        """Forward passes per step; 1 where the batch sizes do not say."""
        total = self.config.training.global_batch_size
        return total // self.unit if total > 0 and self.is_resolved and total % self.unit == 0 else 1

    @property
    def accumulations(self) -> tuple[int, ...]:
        """Forward passes of every step that the run has, as the batch grows; 0 where that is unknown."""
        if not self.is_resolved:
            return (0,)
        if not self.config.training.batch_ramp:
            return (self.num_accumulated,)
        sizes = self.config.training.batch_sizes(self.config.training.global_batch_size)
        return tuple(dict.fromkeys(size // self.unit for _, size in sizes))

    @property
    def num_micro_batches(self) -> int:
        """What a pipeline gets in a step."""
        local = self.config.training.local_batch_size * self.num_accumulated
        if ramp := self.config.training.batch_ramp:  # of this every step has a multiple
            local = math.gcd(local, *(size // self.dp for size in ramp[:2]))
        return local // self.parallelism.pipeline_parallel_microbatch_size

    @property
    def method(self) -> str:
        """How attention sees the whole of a cut sequence."""
        return self.parallelism.context_parallel_rotate_method if self.cp > 1 else ""

    @property
    def has_documents(self) -> bool:
        """True when attention ends at document borders."""
        return getattr(self.args, "attn_mask_type", "causal") != "causal"

    @property
    def cuts_twice(self) -> bool:
        """True when each rank takes a piece of a sequence's head and one of its tail."""
        return self.method in ("allgather", "alltoall") and self.parallelism.context_parallel_load_balancer is not None

    @property
    def pieces(self) -> int:
        """What a sequence is cut into."""
        tp = self.tp if self.parallelism.enable_sequence_parallel else 1
        return tp * self.cp * (2 if self.cuts_twice else 1)

    @property
    def pieces_text(self) -> str:
        """`pieces` as the product of what makes it."""
        tp = self.tp if self.parallelism.enable_sequence_parallel else 1
        halves = " x 2 (head and tail)" if self.cuts_twice else ""
        return f"tensor_parallel_degree x context_parallel_degree = {tp} x {self.cp}{halves} = {self.pieces}"

    @property
    def ranks_of_a_node(self) -> int:
        """Where a launcher has not told: 8, as in most machines made for training."""
        return self.local_world_size or 8
