"""Sections about the model and its training: optimizer, schedule, batches, datasets, validation."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from torchtitan_like.config.base import (
    BatchRamp,
    Facts,
    HomePath,
    MinusOneOrPositive,
    NameOf,
    Need,
    Section,
    StepRanges,
    StepWeights,
    above,
    enabled,
    field,
    one_of,
)
from torchtitan_like.config.problems import Rule
from torchtitan_like.util.bundle import TOKENIZER_IN_REPOSITORY, find_assets

# A name that users give to a table, such as a dataset in [data.sources.<name>].
TableName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


ConverterName = Annotated[
    str,
    NameOf(
        "converter",
        (
            "quantize.linear.float8",
            "quantize.grouped_mm.float8",
            "quantize.linear.mx",
            "quantize.grouped_mm.mx",
        ),
    ),
]


class Model(Section):
    """The model and its size."""

    facts: ClassVar[Facts] = Facts(affects="model")

    name: str = field(
        "llama3",
        "Registered name of the model. hf takes its sizes from config.json in model.hf_assets_path.",
    )
    flavor: str = field(
        "debugmodel",
        "Size of the model, e.g. debugmodel, 1B, 3B, 8B, 70B, 405B for llama3. "
        "docs/guides/models.md lists all. With hf, config.json sets it.",
    )
    hf_assets_path: HomePath = field(
        TOKENIZER_IN_REPOSITORY,
        "Folder of the tokenizer and, for weights in Hugging Face's format, of config.json and the "
        "index. Relative to the current directory. If the default does not exist, the tokenizer of "
        "the package is used.",
        min_length=1,
        affects="nothing",
    )
    tokenizer_path: HomePath | None = field(
        None,
        "Deprecated: folder or file of the tokenizer, if it is not in model.hf_assets_path.",
        affects="nothing",
    )
    converters: list[ConverterName] = field(
        [],
        "Converters to apply to the model: first your own in this order, then the package's. "
        "Not available yet: MX and float8 of grouped_mm.",
    )
    print_after_conversion: bool = field(
        False,
        "Print the model after the converters.",
        affects="nothing",
        needs=Need("converters", "a converter in {key}", lambda converters, _: bool(converters)),
    )
    args: dict[str, Any] = field(
        {},
        "Arguments of the model that override the flavor's, e.g. dim = 512 or n_layers = 8.",
    )
    parametrization: Literal["standard", "mup", "completep"] = field(
        "standard",
        "How initial weights and learning rates depend on the sizes. mup: as muP, in which the "
        "hyperparameters of the base model (base_args) stay the best ones over width. completep: "
        "over width and depth. Both need AdamW.",
    )
    base_args: dict[str, Any] = field(
        {},
        "Arguments of the base model, for which the hyperparameters were chosen, where they differ "
        "from this model's, e.g. dim = 256 and n_heads = 4. completep also takes n_layers.",
        needs=one_of("parametrization", "mup", "completep"),
    )

    @property
    def assets_folder(self) -> str:
        """Folder of tokenizer and assets: `hf_assets_path`, or the one in the package."""
        return find_assets(self.hf_assets_path)

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer, or a tiktoken file."""
        return self.tokenizer_path or self.assets_folder


OptimizerName = Annotated[str, NameOf("optimizer", ("Adam", "AdamW", "AdamW8bit", "Lion", "Muon"))]


def _in_use(*names: str) -> Need:
    """Return the need for one of these optimizers, in `[optimizer]` or in a group."""
    return Need(
        "name",
        f"{one_of('name', *names).condition}, there or in a group",
        lambda _, config: not config.optimizer.names.isdisjoint(names),
    )


_ADAM_IN_USE = _in_use("Adam", "AdamW", "AdamW8bit")
_HAS_BFLOAT16 = Need(
    "training.dtype",
    '{key} or optimizer.state_dtype = "bfloat16"',
    lambda dtype, config: "bfloat16" in (dtype, config.optimizer.state_dtype),
)


class OptimizerGroup(Section):
    """Parameters with their own optimizer, learning rate or weight decay."""

    facts: ClassVar[Facts] = Facts(affects="optimizer")

    parameters: list[str] = field(
        description='Patterns of parameter names, e.g. ["tok_embeddings.*", "output.*"]. Each must '
        "match a parameter, and a parameter may match only one group.",
        min_length=1,
    )
    name: OptimizerName | None = field(None, "Optimizer. Unset: optimizer.name.")
    lr: float | None = field(
        None, "Peak learning rate. The schedule multiplies it. Unset: optimizer.lr.", gt=0
    )
    weight_decay: float | None = field(None, "Weight decay. Unset: optimizer.weight_decay.", ge=0)


class Optimizer(Section):
    """The optimizer."""

    facts: ClassVar[Facts] = Facts(affects="optimizer")

    name: OptimizerName = field(
        "AdamW",
        "Optimizer: Adam; AdamW (decoupled weight decay); AdamW8bit, whose running means of matrices "
        "have 8 bits (torchao); Lion; Muon for the matrices of hidden layers, with AdamW for all "
        "other parameters.",
    )
    lr: float = field(8e-4, "Peak learning rate. The schedule multiplies it.", gt=0)
    beta1: float = field(
        0.9, "Adam's decay of the running mean of gradients.", ge=0, lt=1, needs=_ADAM_IN_USE
    )
    beta2: float = field(
        0.95,
        "Adam's decay of the running mean of squared gradients.",
        ge=0,
        lt=1,
        needs=_ADAM_IN_USE,
    )
    eps: float = field(1e-8, "Added to the denominator of Adam's update.", gt=0, needs=_ADAM_IN_USE)
    weight_decay: float = field(
        0.1, "Weight decay. AdamW multiplies it with the learning rate.", ge=0
    )
    implementation: Literal["for-loop", "foreach", "fused"] = field(
        "fused",
        "fused: one kernel per parameter group, the fastest on CPU too. foreach: a few kernels. "
        "for-loop: kernels for each parameter.",
        affects="nothing",
    )
    early_step_in_backward: bool = field(
        False,
        "Update each parameter as soon as its gradient is complete, and free the gradient. "
        "Gradients are not clipped.",
    )
    no_weight_decay: list[str] = field(
        [],
        'Patterns of parameter names without weight decay, e.g. ["*norm*", "tok_embeddings.*"]. '
        "Each pattern must match a parameter.",
        needs=Need(
            "weight_decay", "{key} > 0", lambda _, config: config.optimizer.has_weight_decay
        ),
    )
    state_dtype: Literal["bfloat16", "float32", "float64"] | None = field(
        None,
        "Type of the running means of Adam, AdamW and Lion. Unset: training.dtype.",
    )
    bf16_rounding: Literal["nearest", "stochastic", "kahan"] = field(
        "nearest",
        "How Adam, AdamW and Lion round to bfloat16. stochastic: weights and states, up or down so "
        "that the expectation is exact. kahan: keep the rounding error of the weights in a further "
        "bfloat16 state.",
        needs=_HAS_BFLOAT16,
    )
    adamw8bit_block_size: int = field(
        256,
        "Elements of a row with a common scale in the states of AdamW8bit. Weights whose rows it does "
        "not divide, and weights of one dimension, have the states of AdamW.",
        gt=0,
        needs=_in_use("AdamW8bit"),
    )
    lion_beta1: float = field(
        0.9, "Weight of Lion's running mean in the update.", ge=0, lt=1, needs=_in_use("Lion")
    )
    lion_beta2: float = field(
        0.99, "Decay of Lion's running mean of gradients.", ge=0, lt=1, needs=_in_use("Lion")
    )
    muon_momentum: float = field(
        0.95, "Decay of Muon's momentum.", ge=0, lt=1, needs=_in_use("Muon")
    )
    muon_nesterov: bool = field(True, "Nesterov's momentum for Muon.", needs=_in_use("Muon"))
    muon_ns_steps: int = field(
        5,
        "Steps of the Newton-Schulz iteration that orthogonalizes Muon's momentum.",
        gt=0,
        lt=100,
        needs=_in_use("Muon"),
    )
    muon_eps: float = field(
        1e-7, "Smallest norm by which Muon divides a matrix.", gt=0, needs=_in_use("Muon")
    )
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = field(
        "original",
        "Factor of Muon's learning rate for a matrix. original: sqrt(max(1, rows / columns)). "
        "match_rms_adamw: 0.2 sqrt(max(rows, columns)), with which AdamW's learning rate and "
        "weight decay fit Muon.",
        needs=_in_use("Muon"),
    )
    muon_dtype: Literal["bfloat16", "float32", "float64"] = field(
        "bfloat16", "Type in which Muon orthogonalizes.", needs=_in_use("Muon")
    )
    groups: dict[TableName, OptimizerGroup] = field(
        {}, "Parameters with settings of their own, one table per name."
    )

    @property
    def names(self) -> set[str]:
        """The optimizers in use. Muon's other parameters have AdamW."""
        names = {self.name, *(group.name for group in self.groups.values() if group.name)}
        return names | {"AdamW"} if "Muon" in names else set(names)

    @property
    def has_weight_decay(self) -> bool:
        """True if the weight of some parameters decays."""
        return any((self.weight_decay, *(group.weight_decay for group in self.groups.values())))

    def settings_of(self, group: str) -> OptimizerGroup:
        """Return the settings of a group. This section sets the ones that the group leaves out.

        "" is the group of the parameters that match no pattern.
        """
        own = self.groups[group].model_dump(exclude_none=True) if group else {"parameters": ["*"]}
        settings = {"name": self.name, "lr": self.lr, "weight_decay": self.weight_decay}
        return OptimizerGroup(**(settings | own))

    def groups_of(self, parameter: str) -> list[str]:
        """Return the names of the groups that a parameter's name matches: at most one is valid."""
        return [
            name
            for name, group in self.groups.items()
            if any(fnmatchcase(parameter, pattern) for pattern in group.parameters)
        ]


class EMA(Section):
    """Exponential moving average (EMA) of the weights, for validation and export."""

    facts: ClassVar[Facts] = Facts(affects="ema", needs=(enabled(),))

    enable: bool = field(
        False,
        "Average the weights over the updates, in float32, and save the average in checkpoints.",
        affects="nothing",
    )
    decay: float = field(
        0.9999,
        "Part of the average that an update keeps; 1 - decay is the part of the new weights.",
        gt=0,
        lt=1,
    )
    warmup: bool = field(
        True,
        "Lower the decay of early updates: after the n-th update to at most (1 + n) / (10 + n).",
    )
    validation: bool = field(
        False,
        "Validate with the averaged weights too. They then replace the weights, a copy of which "
        "takes memory meanwhile.",
        affects="nothing",
        needs=enabled("validation.enable"),
    )


class LRScheduler(Section):
    """Learning rate schedule: warmup, stable phase, decay."""

    facts: ClassVar[Facts] = Facts(affects="lr_scheduler")
    BUILT_IN: ClassVar[Need] = one_of("name", "wsd")
    DECAYING: ClassVar[Need] = Need(
        "decay_ratio", "{key} > 0, or unset", lambda ratio, _: ratio != 0, "nothing decays"
    )

    name: Annotated[str, NameOf("learning-rate schedule", ("wsd",))] = field(
        "wsd", "Schedule. wsd: warmup, stable phase, decay, with the settings below."
    )
    warmup_steps: int = field(
        200, "Steps of linear warmup from 0 to optimizer.lr.", ge=0, needs=BUILT_IN
    )
    total_steps: int | None = field(
        None,
        "Last step of the decay. Unset: training.steps. Set it to extend a run later.",
        gt=0,
    )
    decay_ratio: float | None = field(
        None,
        "Fraction of total_steps that the decay takes, after a stable phase. Unset: all steps "
        "after the warmup.",
        ge=0,
        le=1,
        needs=BUILT_IN,
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = field(
        "linear",
        "Shape of the decay: linear, sqrt (1 - square root), cosine.",
        needs=(BUILT_IN, DECAYING),
    )
    min_lr_factor: float = field(
        0.0,
        "Fraction of the peak learning rate that the decay would reach one step after total_steps.",
        ge=0,
        le=1,
        needs=(BUILT_IN, DECAYING),
    )


class DataLoader(Section):
    """Worker processes that prepare batches."""

    facts: ClassVar[Facts] = Facts(affects="nothing")
    USING_WORKERS: ClassVar[Need] = above(0, "num_workers")

    num_workers: int = field(
        0, "Worker processes per rank. 0: the main process prepares batches.", ge=0
    )
    persistent_workers: bool = field(
        False,
        "Keep workers alive between validations. Workers of the training dataset always live as "
        "long as the run.",
        needs=USING_WORKERS,
    )
    pin_memory: bool = field(
        False, "No effect: batches are always copied to a GPU through page-locked memory."
    )
    prefetch_factor: int | None = field(
        None,
        "Batches that each worker prepares ahead. Unset: PyTorch's default.",
        gt=0,
        needs=USING_WORKERS,
    )


class Training(Section):
    """Batches, steps and numerics of training."""

    dataset: str = field(
        "c4_test",
        "Name of the training dataset. Ignored if [data.sources] names the datasets.",
        affects="nothing",
    )
    dataset_path: HomePath | None = field(
        None,
        "File, folder or glob of the training dataset, instead of the one that `dataset` names.",
        affects="nothing",
    )
    local_batch_size: int = field(
        8, "Samples per micro-batch on each data-parallel rank.", gt=0, affects="nothing"
    )
    global_batch_size: MinusOneOrPositive = field(
        -1,
        "Samples per step over all ranks = local_batch_size x data-parallel ranks x gradient "
        "accumulation. -1: without accumulation.",
        affects="dataloader",
    )
    batch_ramp: BatchRamp = field(
        [],
        "Grow the batch: the first steps read `start` samples, up to global_batch_size. "
        "`increment` is added at equal intervals, spread over the first `samples` samples. "
        "[]: the batch does not grow.",
        affects="dataloader",
    )
    seq_len: int = field(2048, "Tokens per sample.", gt=0, affects="nothing")
    max_norm: float = field(
        1.0, "Gradients are clipped to this total L2 norm.", gt=0, affects="optimizer"
    )
    steps: int = field(
        10000, "Steps to train, counted from the start of the first run.", gt=0, affects="nothing"
    )
    enable_cpu_offload: bool = field(
        False,
        "Keep parameters, gradients and optimizer states in host memory (FSDP2, needs a GPU).",
        affects="nothing",
    )
    dtype: Literal["bfloat16", "float32", "float64"] = field(
        "float32", "Type of the stored weights and optimizer states.", affects="model"
    )
    mixed_precision_param: Literal["bfloat16", "float32", "float64"] = field(
        "bfloat16", "Type in which the model computes.", affects="numerics"
    )
    mixed_precision_reduce: Literal["bfloat16", "float32", "float64"] = field(
        "float32", "Type in which gradients are reduced.", affects="numerics"
    )
    attention_backend: Literal["auto", "cudnn", "flash", "efficient", "math"] = field(
        "auto",
        'Backend of torch\'s scaled_dot_product_attention (attn_type = "sdpa"). auto: torch '
        "chooses among those that are not known to be wrong for the shapes.",
        affects="numerics",
    )
    grouped_mm: Literal["auto", "kernel", "padded", "loop"] = field(
        "auto",
        "Matrix products of experts. kernel: one torch.nn.functional.grouped_mm. padded: the same, "
        "each expert's rows filled with zeros to a multiple of 16. loop: one product for each "
        "expert. auto: kernel where it accepts the sizes, else loop.",
        affects="numerics",
    )
    gc_freq: int = field(
        50,
        "Collect Python's garbage every this many steps on all ranks. 0: Python decides.",
        ge=0,
        affects="nothing",
    )
    gc_debug: bool = field(
        False,
        "Collect garbage at every step and report cycles that hold tensors.",
        affects="nothing",
        needs=above(0, "gc_freq"),
    )
    skip_steps: StepRanges = field(
        [],
        "Skip the samples of these steps, for example after a loss spike: step `first` reads the "
        "samples that follow step `last`. The numbers of a pair count the steps of a run that has "
        "skipped the earlier pairs.",
        affects="future_samples",
    )
    dataloader: DataLoader = field(DataLoader(), "Worker processes of the training dataset.")

    rules: ClassVar[tuple[Rule[Training], ...]] = (
        Rule(
            "unreachable-batch-ramp",
            "batch_ramp",
            lambda section: bool(section.batch_ramp) and not section.reaches_global_batch_size(),
            "[start, increment, samples], all > 0, where start + a multiple of increment is "
            "global_batch_size",
            "write [16, 16, 1000000] with global_batch_size = 64, for example",
            ("global_batch_size",),
        ),
    )

    def reaches_global_batch_size(self) -> bool:
        """Return True if `batch_ramp` is well formed and ends at `global_batch_size`."""
        if len(self.batch_ramp) != 3 or min(self.batch_ramp) < 1:
            return False
        growth = self.global_batch_size - self.batch_ramp[0]
        return growth > 0 and growth % self.batch_ramp[1] == 0

    def batch_sizes(self, last: int) -> list[tuple[int, int]]:
        """Return (first step, samples per step) for every batch size of the run.

        Each size lasts until its share of the ramp's samples has been read, as in Megatron-LM's
        `--rampup-batch-size`. last: the batch size after the ramp.
        """
        if not self.batch_ramp:
            return [(1, last)]
        start, increment, samples = self.batch_ramp
        step = 1
        num_read = 0
        sizes = []
        num_increments = (last - start) // increment
        for i in range(num_increments):
            size = start + i * increment
            end = -(-(i + 1) * samples // num_increments)
            num_steps = -((num_read - end) // size)
            if num_steps > 0:
                sizes.append((step, size))
                step += num_steps
                num_read += num_steps * size
        return [*sizes, (step, last)]


SourceFormat = Annotated[
    str, NameOf("data source", ("auto", "text", "jsonl", "parquet", "arrow", "tokens"))
]


class DataSource(Section):
    """One dataset: its files and how they are read."""

    facts: ClassVar[Facts] = Facts(affects="nothing")

    path: HomePath = field(
        description="File, folder or glob, relative to the current directory. On the Hub: "
        "hf://datasets/OWNER/NAME@REVISION/PATTERN.",
        min_length=1,
    )
    format: SourceFormat = field(
        "auto",
        "Format of the files. auto: by the file name's extension. tokens: token ids (Megatron "
        ".bin with .idx, .npy, flat .bin, folders of a token cache). Your own data source "
        "receives the path.",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = field(
        "auto",
        "Type of the token ids in flat .bin files (without .idx). auto: uint16 for a vocabulary "
        "of at most 65,536.",
        needs=one_of("format", "tokens"),
    )
    processor: Annotated[str, NameOf("sample processor")] | None = field(
        None,
        "Sample processor that turns each record into text. Unset: text_field has the text.",
    )
    text_field: str = field(
        "text",
        "Field or column that contains the text of a document.",
        min_length=1,
        needs=Need(
            "format",
            '{key} other than "tokens"',
            lambda format_name, _: format_name != "tokens",
            "token files contain no text",
        ),
    )
    streaming: bool = field(
        False,
        "Tokenize the dataset while training, and keep only the next part of it: for datasets "
        "that are too large for a token cache.",
    )
    weight: float = field(
        1.0,
        "Mixture weight: fraction of the training tokens from this source, relative to the "
        "other weights.",
        ge=0,
    )
    weight_from: StepWeights = field(
        [],
        "Mixture weights from later steps on, for example for annealing, or for a source that "
        "starts later.",
    )
    max_epochs: int = field(
        0,
        "Number of times to read the source. Then the other sources share its weight. 0: no limit.",
        ge=0,
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
            "processed-token-files",
            "processor",
            lambda source: source.format == "tokens" and source.processor is not None,
            'unset with format = "tokens", which has no records',
            "leave it out",
            ("format",),
        ),
    )


class Data(Section):
    """Datasets, and how their documents become samples."""

    # The datasets of a run have a fingerprint of their own; see `allow_change`.
    facts: ClassVar[Facts] = Facts(affects="nothing")
    READING_TEXT: ClassVar[Need] = Need(
        "sources",
        "a source of text",
        lambda _, config: config.reads_text,
        'format = "tokens" reads token ids without changes',
    )

    sources: dict[TableName, DataSource] = field({}, "The training datasets, one table per name.")
    cache_folder: HomePath | None = field(
        None,
        "Folder of the token cache. Unset: .token_cache/ next to the dataset, or the user's cache "
        "folder ($XDG_CACHE_HOME or ~/.cache) if that is read-only.",
    )
    allow_change: list[str] = field(
        [],
        "Properties of the datasets that may differ from the resumed run. The error that refuses "
        "a change lists the names.",
    )
    shuffle: bool = field(True, "Shuffle documents and samples, differently in every epoch.")
    packing: Literal["concat", "best_fit"] = field(
        "concat",
        "concat: concatenate documents and split them into samples. best_fit: split only "
        "documents longer than a sample; samples may end in padding, and no document's first "
        "token is a label.",
    )
    mask_document_starts: bool = field(
        False,
        "Do not use the first token of a document as a label: the previous document does not "
        "predict it.",
    )
    add_bos: bool = field(
        True, "Insert the beginning-of-text token before each document.", needs=READING_TEXT
    )
    add_eos: bool = field(
        True, "Insert the end-of-text token after each document.", needs=READING_TEXT
    )
    on_bad_record: Literal["error", "skip"] = field(
        "error",
        "Handling of a line or row without readable text. error: end the run and report its position. "
        "skip: leave it out and count it.",
        needs=READING_TEXT,
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
                "streams without max_epochs in a mixture "
                f"({', '.join(data.ending_streams())} sets it): not available yet"
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

    facts: ClassVar[Facts] = Facts(affects="nothing")

    name: Annotated[str, NameOf("loss", ("cross_entropy",))] = field(
        "cross_entropy", "Loss of a token.", affects="numerics"
    )
    chunk_mib: int = field(
        1536,
        "MiB of float32 logits that the loss holds at once (3,100 tokens of a vocabulary of 128,256). "
        "More chunks add the weight gradient more often. 0: no chunks.",
        ge=0,
    )


class Validation(Section):
    """Loss on held-out datasets, always on the same samples."""

    facts: ClassVar[Facts] = Facts(affects="nothing", needs=(enabled(),))

    enable: bool = field(False, "Validate during training.")
    dataset: str = field(
        "c4_validation",
        "Name of the validation dataset. Ignored if [validation.sources] names the datasets.",
    )
    dataset_path: HomePath | None = field(
        None,
        "File, folder or glob of the validation dataset, instead of the one that `dataset` names.",
    )
    local_batch_size: int = field(8, "Samples per batch on each data-parallel rank.", gt=0)
    seq_len: int = field(2048, "Tokens per sample.", gt=0)
    freq: int = field(10, "Validate every this many steps, and after the first step.", gt=0)
    steps: MinusOneOrPositive = field(
        -1, "Batches of local_batch_size samples, over all ranks. -1: read the whole dataset once."
    )
    reference_curve: HomePath | None = field(
        None,
        "CSV file (seed, tokens, bits_per_byte) to compare the first validation dataset with in "
        "the log. A relative path starts in the current directory, or else in the package's "
        "train_configs.",
    )
    dataloader: DataLoader = field(DataLoader(), "Worker processes of the validation dataset.")
    sources: dict[TableName, DataSource] = field({}, "The validation datasets, one table per name.")

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
