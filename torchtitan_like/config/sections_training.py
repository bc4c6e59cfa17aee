"""Sections about what is learnt and from what: model, optimizer, schedule, training, data, loss, validation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from torchtitan_like.config.base import (
    BatchRamp,
    HomePath,
    MinusOneOrPositive,
    Section,
    StepRanges,
    StepWeights,
)
from torchtitan_like.config.rules import Rule
from torchtitan_like.util.bundle import TOKENIZER_IN_REPOSITORY, find_assets


class Model(Section):
    """Which model, in which size."""

    name: str = Field("llama3", description="Registered name of the model.")
    flavor: str = Field(
        "debugmodel",
        description="Size of the model, e.g. debugmodel, 1B, 3B, 8B, 70B, 405B for llama3. docs/guides/models.md lists all.",
    )
    hf_assets_path: HomePath = Field(
        TOKENIZER_IN_REPOSITORY,
        min_length=1,
        description="Folder with the tokenizer and, for weights in Hugging Face's format, config.json and the index. "
        "Relative to the current directory. If the default does not exist, the tokenizer of the package is used.",
    )
    tokenizer_path: HomePath | None = Field(
        None, description="Deprecated: folder or file of the tokenizer, if it does not lie in model.hf_assets_path."
    )
    converters: list[
        Literal["quantize.linear.float8", "quantize.grouped_mm.float8", "quantize.linear.mx", "quantize.grouped_mm.mx"]
    ] = Field([], description="Converters applied to the model, in this order.")
    print_after_conversion: bool = Field(False, description="Print the model after the converters were applied.")
    args: dict[str, Any] = Field(
        {}, description="Sizes that override the flavor's, e.g. dim = 512 or n_layers = 8. Any argument of the model."
    )

    @property
    def assets_folder(self) -> str:
        """Folder of tokenizer and assets: `hf_assets_path`, or the one in the package."""
        return find_assets(self.hf_assets_path)

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer, or a tiktoken file."""
        return self.tokenizer_path or self.assets_folder


class Optimizer(Section):
    """The optimizer."""

    name: Literal["Adam", "AdamW"] = Field("AdamW", description="Optimizer: Adam or AdamW (decoupled weight decay).")
    lr: float = Field(8e-4, gt=0, description="Peak learning rate; the schedule multiplies it.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the running mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of squared gradients.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator of the update.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay; AdamW multiplies it with the learning rate.")
    implementation: Literal["for-loop", "foreach", "fused"] = Field(
        "fused",
        description="fused: one kernel per group, fastest on CPU too. foreach: a few. for-loop: per parameter.",
    )
    early_step_in_backward: bool = Field(
        False,
        description="Update each parameter as soon as its gradient is complete and free it. No gradient clipping.",
    )
    no_weight_decay: list[str] = Field(
        [],
        description='Patterns of names of parameters without weight decay, e.g. ["*norm*", "tok_embeddings.*"]; each matches '
        "one or more.",
    )


class LRScheduler(Section):
    """The learning rate over the steps: warm-up, stable phase, decay."""

    warmup_steps: int = Field(200, ge=0, description="Steps of linear warm-up from 0 to optimizer.lr.")
    total_steps: int | None = Field(
        None,
        gt=0,
        description="Step at which the decay ends. Unset: training.steps; set it so that a run can be extended.",
    )
    decay_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of total_steps in which the rate decays, after a stable phase. Unset: all but the warm-up.",
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = Field(
        "linear", description="Shape of the decay: linear, sqrt (1 - square root), cosine."
    )
    min_lr_factor: float = Field(
        0.0, ge=0, le=1, description="Share of the peak learning rate that is left at the end of the decay."
    )


class DataLoader(Section):
    """Worker processes that prepare batches."""

    num_workers: int = Field(0, ge=0, description="Worker processes per rank; 0 prepares batches in the main process.")
    persistent_workers: bool = Field(
        False, description="Keep workers alive between validations; those of the training text live as long as the run."
    )
    pin_memory: bool = Field(False, description="No effect: batches go to a GPU through page-locked memory either way.")
    prefetch_factor: int | None = Field(
        None, gt=0, description="Batches each worker prepares ahead. Unset: PyTorch's default."
    )


def _are_step_ranges(ranges: list[list[int]]) -> bool:
    """Return True for pairs [first, last] with 1 <= first <= last, in order of their first steps."""
    are_pairs = all(len(pair) == 2 and 1 <= pair[0] <= pair[1] for pair in ranges)
    return are_pairs and sorted(ranges, key=lambda pair: pair[0]) == ranges


def _are_step_weights(pairs: list[list[int | float]]) -> bool:
    """Return True for pairs [step, weight] with steps >= 2 in order and weights >= 0."""
    are_pairs = all(len(pair) == 2 and isinstance(pair[0], int) and pair[1] >= 0 for pair in pairs)
    steps = [1, *(pair[0] for pair in pairs)] if are_pairs else []
    return are_pairs and steps == sorted(set(steps))


class Training(Section):
    """Batches, steps, numerics of training."""

    dataset: str = Field(
        "c4_test", description="Name of the training text (see docs); ignored where [data.sources] names the text."
    )
    dataset_path: HomePath | None = Field(
        None, description="File, folder or glob of the training text, in place of where `dataset` lies."
    )
    local_batch_size: int = Field(8, gt=0, description="Samples of one micro-batch on each data-parallel rank.")
    global_batch_size: MinusOneOrPositive = Field(
        -1,
        description="Samples per step over all ranks = local_batch_size x data-parallel ranks x accumulation. "
        "-1: without accumulation.",
    )
    batch_ramp: BatchRamp = Field(
        [],
        description="[start, increment, samples]: the first steps read `start` samples, and `increment` more after every equal "
        "part of `samples`, until it is global_batch_size. []: all steps read as many.",
    )
    seq_len: int = Field(2048, gt=0, description="Tokens per sample.")
    max_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this total L2 norm.")
    steps: int = Field(10000, gt=0, description="Steps to train, counted from the beginning of the first run.")
    enable_cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer states in host memory (FSDP2, needs a GPU)."
    )
    dtype: Literal["bfloat16", "float32", "float64"] = Field(
        "float32", description="Type in which weights and optimizer states are stored."
    )
    mixed_precision_param: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16", description="Type in which the model computes."
    )
    mixed_precision_reduce: Literal["bfloat16", "float32", "float64"] = Field(
        "float32", description="Type in which gradients are reduced."
    )
    gc_freq: int = Field(
        50, ge=0, description="Python's garbage is collected every this many steps on all ranks; 0 leaves it to Python."
    )
    gc_debug: bool = Field(False, description="Collect garbage at every step and report cycles that hold tensors.")
    skip_steps: StepRanges = Field(
        [],
        description="Steps whose samples are left out, [[first, last], ...], after a loss spike say: the step `first` reads "
        "what would have come after `last`. Each pair counts the steps of a run with the pairs before it.",
    )
    dataloader: DataLoader = Field(DataLoader(), description="Worker processes of the training data.")

    rules: ClassVar[tuple[Rule[Training], ...]] = (
        Rule(
            "unordered-skip-steps",
            "skip_steps",
            lambda section: not _are_step_ranges(section.skip_steps),
            "pairs of steps, 1 <= first <= last, in order",
            "write [[100, 110], [500, 500]], for example",
        ),
        Rule(
            "unreachable-batch-ramp",
            "batch_ramp",
            lambda section: bool(section.batch_ramp) and not section.reaches_global_batch_size(),
            "[start, increment, samples], all > 0, where start + a multiple of increment is global_batch_size",
            "write [16, 16, 1000000] with global_batch_size = 64, for example",
            ("global_batch_size",),
        ),
    )

    def reaches_global_batch_size(self) -> bool:
        """Return True if `batch_ramp` is well formed and ends at `global_batch_size`."""
        if len(self.batch_ramp) != 3 or min(self.batch_ramp) < 1:
            return False
        grows_by = self.global_batch_size - self.batch_ramp[0]
        return grows_by > 0 and grows_by % self.batch_ramp[1] == 0

    def batch_sizes(self, last: int) -> list[tuple[int, int]]:
        """(first step, samples per step) for every batch size of the run, the last of which is ``last``.

        As Megatron-LM's ``--rampup-batch-size``: each size holds until its part of the ramp's samples has been read.
        """
        if not self.batch_ramp:
            return [(1, last)]
        start, increment, samples = self.batch_ramp
        step, num_read, sizes = 1, 0, []
        num_increments = (last - start) // increment
        for i in range(num_increments):
            size, end = start + i * increment, -(-(i + 1) * samples // num_increments)
            num_steps = -((num_read - end) // size)
            if num_steps > 0:
                sizes.append((step, size))
                step, num_read = step + num_steps, num_read + num_steps * size
        return [*sizes, (step, last)]


class DataSource(Section):
    """One text: where it lies and how it is read."""

    path: HomePath = Field(
        min_length=1,
        description="File, folder or glob, relative to the current directory; or on the Hub, "
        "hf://datasets/OWNER/NAME@REVISION/PATTERN.",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tokens"] = Field(
        "auto",
        description="Format of the files; auto goes by the file's ending. tokens: token ids, read as they stand (Megatron "
        ".bin with .idx, .npy, flat .bin, folders of a token cache).",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = Field(
        "auto",
        description="Type of the ids in flat .bin files (without .idx); auto is uint16 for a vocabulary of at most 65,536.",
    )
    text_field: str = Field("text", min_length=1, description="Field or column that holds the text of a document.")
    streaming: bool = Field(
        False,
        description="Tokenise the text while it is read and keep only the next part: for texts too large for a token cache.",
    )
    weight: float = Field(
        1.0,
        ge=0,
        description="Share of this source in the tokens that a mixture teaches, relative to the other weights.",
    )
    weight_from: StepWeights = Field(
        [],
        description="Weights from later steps on, [[step, weight], ...]: for annealing, or for a source that comes in later.",
    )
    max_epochs: int = Field(
        0, ge=0, description="Times the source is read, then the others share its part; 0 is without limit."
    )

    rules: ClassVar[tuple[Rule[DataSource], ...]] = (
        Rule(
            "streamed-token-files",
            "streaming",
            lambda source: source.format == "tokens" and source.streaming,
            'false with format = "tokens"',
            "leave it out: token files are read in place",
            ("format",),
        ),
        Rule(
            "unordered-weights",
            "weight_from",
            lambda source: not _are_step_weights(source.weight_from),
            "pairs of a step >= 2 and a weight >= 0, in order of the steps",
            "write [[10000, 3.0], [20000, 0]], for example",
        ),
    )


SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class Data(Section):
    """Where text comes from and how it becomes samples."""

    sources: dict[SourceName, DataSource] = Field({}, description="The training texts, one table per name.")
    cache_folder: HomePath | None = Field(
        None,
        description="Folder of the token cache. Unset: .token_cache/ next to the data, or the user's cache folder "
        "($XDG_CACHE_HOME or ~/.cache) if that is read-only.",
    )
    allow_change: list[str] = Field(
        [],
        description="What may differ from the data of the checkpoint that is resumed, by the names that its refusal tells.",
    )
    shuffle: bool = Field(True, description="Shuffle documents and samples, anew in every epoch.")
    packing: Literal["concat", "best_fit"] = Field(
        "concat",
        description="concat: samples are cut from the documents laid end to end. best_fit: no document that fits into a "
        "sample is cut, samples may end in padding, and no document's first token is a label.",
    )
    mask_document_starts: bool = Field(
        False, description="The first token of a document is not a label: it cannot be known from the document before."
    )
    add_bos: bool = Field(
        True, description="Put the beginning-of-text token before each document (not of token files)."
    )
    add_eos: bool = Field(True, description="Put the end-of-text token after each document (not of token files).")
    on_bad_record: Literal["error", "skip"] = Field(
        "error",
        description="What a line or row without readable text does: end the run with its place, or be left out and counted.",
    )

    rules: ClassVar[tuple[Rule[Data], ...]] = (
        Rule(
            "no-weight-at-first-step",
            "sources",
            lambda data: (
                bool(data.sources) and not any(source.weight for source in data.sources.values())
            ),
            "a source with a weight > 0 for the first step",
            "give one source a weight",
        ),
        Rule(
            "ending-stream-in-mixture",
            "sources",
            lambda data: len(data.sources) > 1 and bool(data.ending_streams()),
            lambda data: (
                f"streams without max_epochs in a mixture ({', '.join(data.ending_streams())} sets it): not available yet"
            ),
            "leave out max_epochs or streaming",
        ),
    )

    def ending_streams(self) -> list[str]:
        """Return the names of streamed sources that end after `max_epochs`."""
        return [
            name for name, source in self.sources.items() if source.streaming and source.max_epochs
        ]


class Loss(Section):
    """The loss function."""

    chunk_mib: int = Field(
        256,
        ge=0,
        description="MiB of float32 logits that chunked cross-entropy holds at once; 0 computes all in one piece.",
    )


class Validation(Section):
    """Loss on held-out text, always on the same samples."""

    enable: bool = Field(False, description="Validate while training.")
    dataset: str = Field(
        "c4_validation", description="Name of the validation text; ignored where [validation.sources] names the text."
    )
    dataset_path: HomePath | None = Field(
        None, description="File, folder or glob of the validation text, in place of where `dataset` lies."
    )
    local_batch_size: int = Field(8, gt=0, description="Samples of one batch on each data-parallel rank.")
    seq_len: int = Field(2048, gt=0, description="Tokens per sample.")
    freq: int = Field(10, gt=0, description="Validate every this many steps, and after the first step.")
    steps: MinusOneOrPositive = Field(
        -1,
        description="Batches of local_batch_size samples over all ranks together; -1 reads the whole text once.",
    )
    dataloader: DataLoader = Field(DataLoader(), description="Worker processes of the validation data.")
    sources: dict[SourceName, DataSource] = Field({}, description="The validation texts, one table per name.")

    rules: ClassVar[tuple[Rule[Validation], ...]] = (
        Rule(
            "streamed-validation",
            "sources",
            lambda section: (
                section.enable and any(source.streaming for source in section.sources.values())
            ),
            "sources that are not streamed: each validation reads the same samples",
            "leave out streaming",
            ("enable",),
        ),
    )
