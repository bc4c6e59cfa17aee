"""The facts about a run that rules read: configuration, ranks, model, hardware, torch release."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_like.config.sections_scale import GRAPH_BACKENDS
from torchtitan_like.distributed.dims import ParallelDims, resolve_degrees
from torchtitan_like.distributed.float8 import FLOAT8
from torchtitan_like.distributed.stages import StagePlan, plan_stages
from torchtitan_like.util.modules import is_dotted

if TYPE_CHECKING:
    from torchtitan_like.check.model_checks import CheckedModel
    from torchtitan_like.config import JobConfig
    from torchtitan_like.config.problems import Problem
    from torchtitan_like.config.sections_scale import Parallelism
    from torchtitan_like.models.spec import ModelSpec

DeviceType = Literal["cpu", "cuda"]

# Ranks of a node if no launcher reports them: most machines for training have 8 GPUs.
USUAL_RANKS_OF_NODE = 8


@dataclass(frozen=True)
class BatchGeometry:
    """Samples of a step: global batch = local batch x data-parallel ranks x accumulated passes.

    num_data_ranks: ranks that read different samples, in all replica groups.
    num_accumulated: forward passes of a rank in a step.
    """

    local_batch_size: int
    num_data_ranks: int
    num_accumulated: int

    @property
    def samples_per_pass(self) -> int:
        """Samples of one forward pass on all data-parallel ranks."""
        return self.local_batch_size * self.num_data_ranks

    @property
    def samples_per_rank(self) -> int:
        return self.local_batch_size * self.num_accumulated

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_pass * self.num_accumulated


@dataclass(frozen=True)
class RunContext:
    """The facts that the rules read.

    world_size: None if the number of ranks is unknown.
    dims: with dp_shard = 1 unless `is_resolved`.
    spec, args: the model and its sizes; None if `model_problems` are why there is none.
    limits: `ModelSpec.constraints`.
    device_type, gpu_capability, local_world_size: None if unknown.
    emulates_bfloat16: the run computes in bfloat16 on a CPU that has no instructions for it.
    stage_plan: None without a pipeline.
    torch_release: (2, 13) for torch 2.13.0.
    degree_errors: why the degrees do not fit the number of ranks, one sentence each.
    """

    config: JobConfig
    world_size: int | None
    dims: ParallelDims
    spec: ModelSpec | None = None
    args: Any = None
    model_problems: Sequence[Problem] = ()
    limits: Mapping[str, int] | None = None
    device_type: DeviceType | None = None
    gpu_capability: tuple[int, int] | None = None
    local_world_size: int | None = None
    emulates_bfloat16: bool = False
    stage_plan: StagePlan | None = None
    torch_release: tuple[int, ...] = ()
    degree_errors: tuple[str, ...] = ()

    @property
    def parallelism(self) -> Parallelism:
        return self.config.parallelism

    @property
    def is_resolved(self) -> bool:
        """True if the degrees fit a known number of ranks."""
        return self.world_size is not None and not self.degree_errors

    @property
    def splits_backward(self) -> bool:
        """True if a pipeline computes gradients of inputs first, and those of weights later."""
        return self.stage_plan is not None and self.stage_plan.splits_backward

    @property
    def num_weight_ranks(self) -> int:
        """Ranks that hold one weight, sharded or replicated; 0 if unknown."""
        return self.dims.dp * self.dims.cp if self.is_resolved else 0

    @property
    def shards_weights(self) -> bool:
        """True if FSDP shards the weights over at least two ranks."""
        return self.dims.dp_shard * self.dims.cp > 1

    @property
    def divides_experts(self) -> bool:
        """True if a key asks for experts on other ranks than the other weights."""
        return self.parallelism.expert_parallel_degree > 1 or self.dims.expert_tp > 1

    @property
    def num_expert_ranks(self) -> int:
        """Ranks over which experts are distributed and sharded."""
        return self.dims.dp_shard * self.dims.cp * self.dims.tp // self.dims.expert_tp

    @property
    def expert_ranks_formula(self) -> str:
        """`num_expert_ranks` as a product of degrees."""
        degrees = {"dp_shard": self.dims.dp_shard, "cp": self.dims.cp}
        if self.dims.expert_tp == 1:
            degrees["tp"] = self.dims.tp
        return f"{' x '.join(degrees)} = {' x '.join(map(str, degrees.values()))}"

    @property
    def uses_tensor_cores(self) -> bool:
        """True if matrix products may run on tensor cores. Unknown hardware counts as a GPU."""
        is_half = self.config.training.mixed_precision_param == "bfloat16"
        return is_half and self.device_type != "cpu" and self.args is not None

    @property
    def has_own_optimizer(self) -> bool:
        """True if user code has the optimizer of some parameters."""
        return any(map(is_dotted, self.config.optimizer.names))

    @property
    def uses_float8(self) -> bool:
        return FLOAT8 in self.config.model.converters

    def width(self, *names: str) -> int:
        """Return the first of these arguments that the model has; 0 if it has none."""
        widths = (int(getattr(self.args, name)) for name in names if hasattr(self.args, name))
        return next(widths, 0)

    def size(self, name: str) -> int:
        """Return a size of the model; 0 if unknown."""
        return (self.limits or {}).get(name, 0)

    def seq_len(self, section: Literal["training", "validation"]) -> int:
        """Return the sequence length of training or validation; 0 if validation is off."""
        if section == "training":
            return self.config.training.seq_len
        return self.config.validation.seq_len if self.config.validation.enable else 0

    @property
    def compiles_model(self) -> bool:
        return self.config.compile.compiles_model

    @property
    def offloads_activations(self) -> bool:
        return self.config.activation_checkpoint.mode == "offload"

    @property
    def has_data_parallel_graph(self) -> bool:
        """True if a compiled graph contains all data-parallel collectives and can be rewritten."""
        is_simple_fsdp = self.parallelism.data_parallel_impl == "simple_fsdp"
        can_rewrite = self.config.compile.backend in GRAPH_BACKENDS
        return is_simple_fsdp and self.compiles_model and can_rewrite

    @functools.cached_property
    def geometry(self) -> BatchGeometry:
        """Samples of a step; of one forward pass if the batch sizes do not determine it."""
        training = self.config.training
        num_groups = max(1, self.config.fault_tolerance.share[1])  # a rule refuses 0
        one_pass = BatchGeometry(training.local_batch_size, self.dims.dp * num_groups, 1)
        number, rest = divmod(training.global_batch_size, one_pass.global_batch_size)
        is_known = self.is_resolved and number > 0 and rest == 0
        return replace(one_pass, num_accumulated=number) if is_known else one_pass

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples that one rank computes at once."""
        if self.dims.pp > 1:
            return self.parallelism.pipeline_parallel_microbatch_size
        return self.config.training.local_batch_size

    @property
    def tokens_per_product(self) -> int:
        """Rows of a matrix product: the tokens of one forward pass on one rank."""
        return self.samples_per_micro_batch * self.config.training.seq_len // self.sequence_shards

    @property
    def accumulations(self) -> tuple[int, ...]:
        """Each number of forward passes per step during the batch ramp; (0,) if unknown."""
        if not self.is_resolved:
            return (0,)
        if not self.config.training.batch_ramp:
            return (self.geometry.num_accumulated,)
        sizes = self.config.training.batch_sizes(self.config.training.global_batch_size)
        return tuple(dict.fromkeys(size // self.geometry.samples_per_pass for _, size in sizes))

    @property
    def num_micro_batches(self) -> int:
        """Pipeline micro-batches in a step. With a batch ramp, every step has a multiple."""
        local = self.geometry.samples_per_rank
        if ramp := self.config.training.batch_ramp:
            local = math.gcd(local, *(size // self.dims.dp for size in ramp[:2]))
        return local // self.parallelism.pipeline_parallel_microbatch_size

    @property
    def rotate_method(self) -> str:
        """How attention reads the keys of a sharded sequence; "" without context parallelism."""
        return self.parallelism.context_parallel_rotate_method if self.dims.cp > 1 else ""

    @property
    def has_document_masks(self) -> bool:
        """True if attention ends at document borders."""
        return getattr(self.args, "attn_mask_type", "causal") != "causal"

    @property
    def has_windows(self) -> bool:
        """True if a token attends to the last tokens only, in some layers."""
        return self.width("sliding_window_size") > 0

    @property
    def has_chunks(self) -> bool:
        """True if sequences are longer than the chunks in which some layers attend."""
        longest = max(self.seq_len("training"), self.seq_len("validation"))
        return 0 < self.width("chunk_size") < longest

    @property
    def has_dynamic_rope(self) -> bool:
        """True if rotary frequencies depend on the length of the sequences."""
        is_dynamic = getattr(self.args, "rope_type", "default") == "dynamic"
        longest = max(self.seq_len("training"), self.seq_len("validation"))
        return is_dynamic and longest > self.width("rope_original_seq_len")

    @property
    def shards_head_and_tail(self) -> bool:
        """True if each rank computes one shard of each half of a sequence."""
        is_balanced = self.parallelism.context_parallel_load_balancer is not None
        return is_balanced and self.rotate_method in ("allgather", "alltoall")

    @property
    def sequence_shards(self) -> int:
        """Number of shards of a sequence."""
        tp = self.dims.tp if self.parallelism.enable_sequence_parallel else 1
        return tp * self.dims.cp * (2 if self.shards_head_and_tail else 1)

    @property
    def sequence_shards_formula(self) -> str:
        """`sequence_shards` with its formula."""
        tp = self.dims.tp if self.parallelism.enable_sequence_parallel else 1
        halves = " x 2 (head and tail)" if self.shards_head_and_tail else ""
        product = f"{tp} x {self.dims.cp}{halves} = {self.sequence_shards}"
        return f"tensor_parallel_degree x context_parallel_degree = {product}"

    @property
    def ranks_of_node(self) -> int:
        return self.local_world_size or USUAL_RANKS_OF_NODE


def build_context(
    config: JobConfig,
    world_size: int | None,
    model: CheckedModel,
    device_type: DeviceType | None = None,
) -> RunContext:
    """Collect the facts of a run."""
    spec, args, problems = model
    parallelism = config.parallelism
    limits = spec.constraints(args) if spec else None
    has_experts = bool((limits or {}).get("n_experts"))
    dims, errors = resolve_degrees(parallelism, world_size, has_experts=has_experts)
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    # Only these depend on the compute capability, and asking for it initializes CUDA.
    is_read = FLOAT8 in config.model.converters or config.compile.cuda_graphs
    needs_capability = device_type == "cuda" and is_read
    is_half_on_cpu = device_type == "cpu" and config.training.mixed_precision_param == "bfloat16"
    return RunContext(
        config,
        world_size,
        dims,
        spec=spec,
        args=args,
        model_problems=problems,
        limits=limits,
        device_type=device_type,
        gpu_capability=_gpu_capability() if needs_capability else None,
        local_world_size=int(local_world_size) if local_world_size.isdecimal() else None,
        emulates_bfloat16=is_half_on_cpu and not _cpu_has_bfloat16(),
        stage_plan=plan_stages(spec, args, parallelism) if dims.pp > 1 else None,
        torch_release=installed_torch_release(),
        degree_errors=tuple(errors),
    )


@functools.cache
def installed_torch_release() -> tuple[int, ...]:
    """Return (2, 13) for torch 2.13.0+cpu, from the metadata of the installed package."""
    return tuple(int(part) for part in metadata.version("torch").split(".")[:2])


def _gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of this rank's GPU. Called after torch has detected one."""
    import torch

    # No rank has selected its GPU yet, so torch's default is the first GPU on all of them.
    index = min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1)
    return torch.cuda.get_device_capability(index) if index >= 0 else None


def _cpu_has_bfloat16() -> bool:
    """Return True if torch multiplies bfloat16 matrices with instructions of this CPU."""
    import torch

    return bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
