"""Build the batches of a run from its config sections.

A token passes through these modules, from bottom to top:

    DataBuilder             finds the sources, tokenizes or opens them, packs them into samples
    batches/iterators.py    TrainBatches: step -> samples of all ranks and of this rank
    batches/batch.py        assemble: tokens, labels and digest of a Batch, perhaps in worker processes
    samples/order.py        SampleOrder: position in the stream -> source and sample
    samples/packing.py      PackedSamples: sample index -> tokens of a token file
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan_like.config.dataset_names import datasets_for
from torchtitan_like.config.sections_training import Data, DataSource, Training, Validation
from torchtitan_like.data.batches.iterators import StepPositions, TrainBatches, ValidationBatches
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples.best_fit import pack
from torchtitan_like.data.samples.order import (
    BLOCK_SAMPLES,
    MIXTURE_VERSION,
    PATTERN,
    PERMUTATION_VERSION,
    WINDOW_BLOCKS,
    SampleOrder,
    Supply,
    seed_of,
)
from torchtitan_like.data.samples.packing import JoinedSamples, PackedSamples
from torchtitan_like.data.samples.streaming import StreamedSamples, window_folder
from torchtitan_like.data.text.documents import Corpus, find_corpus, user_corpus
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.text.user_documents import UserProcessor
from torchtitan_like.data.tokens.build_once import build_once, read_once
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import (
    CacheFolders,
    Entry,
    entry_of,
)
from torchtitan_like.data.tokens.token_file import TokenFile
from torchtitan_like.data.tokens.token_sources import open_token_source
from torchtitan_like.data.tokens.tokenizing import cached_tokens
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.extensions.protocols import Settings
from torchtitan_like.util.modules import is_dotted
from torchtitan_like.util.suggestions import did_you_mean

logger = logging.getLogger()


@dataclass(frozen=True)
class NamedSource:
    """A source and its display name. key: name of its TOML table; "" for a source without table."""

    name: str
    source: DataSource
    key: str = ""


@dataclass(frozen=True)
class DataBuilder:
    """Builds this rank's batches. Each of its methods is a collective of ``group``.

    data: the section [data].
    with_positions: batches have the position of each token in its document.
    group: all ranks.
    is_recorder: see `RunDigests`.
    settings: the config sections of user code.

    The methods raise DataError for invalid text or configuration, and WorkerKilled.
    """

    data: Data
    tokenizer: Tokenizer
    dump_folder: str
    dp_rank: int = 0
    dp_size: int = 1
    with_positions: bool = False
    group: HostGroup = field(default_factory=HostGroup.alone)
    is_recorder: bool = True
    settings: Settings = field(default_factory=dict)

    def train_batches(
        self,
        training: Training,
        *,
        seed: int,
        global_batch_size: int,
        makes_windows_ahead: bool = True,
        replica_group: tuple[int, int] = (0, 1),
    ) -> TrainBatches:
        """Return the training batches at position 0. Builds missing token caches.

        seed: seed of the sample order.
        global_batch_size: samples of a step at its full size, of all replica groups.
        makes_windows_ahead: see `StreamedSamples`.
        replica_group: see `TrainBatches`.
        """
        data, tokenizer = self.data, self.tokenizer
        named = resolve_sources("training", training, data.sources)
        logger.info(
            f"Building the tokenizer: {tokenizer.vocab_size:,} tokens, BOS {tokenizer.bos_id}, EOS "
            f"{tokenizer.eos_id}"
        )
        parts: list[PackedSamples | StreamedSamples] = []
        for one in named:
            if one.source.streaming:
                key = seed_of(one.key, seed) if data.shuffle else None
                stream = functools.partial(
                    self._stream, one.source, training.seq_len, key, makes_windows_ahead
                )
                parts.append(self.group.run_on_all(stream))
            else:
                parts.append(self._packed(one, training.seq_len))
        steps = StepPositions(training.batch_sizes(global_batch_size), training.skip_steps)
        changes = _weight_changes(named)
        order = SampleOrder(
            [_supply(one, part) for one, part in zip(named, parts, strict=True)],
            seed=seed if data.shuffle else None,
            changes=[(steps.first_position(step), weights) for step, weights in changes],
        )
        for one, part in zip(named, parts, strict=True):
            logger.info(f"training data {one.key or training.dataset_path or one.name} {part}")
        _log_order(order, steps, training, named)
        return TrainBatches(
            JoinedSamples(parts),
            order,
            steps,
            fingerprint=self._fingerprint(named, parts, seed, changes),
            local_batch_size=training.local_batch_size,
            sharing=(self.dp_rank, self.dp_size),
            with_positions=self.with_positions,
            allow_change=data.allow_change,
            dataloader=training.dataloader,
            replica_group=replica_group,
        )

    def validation_sets(self, validation: Validation) -> dict[str, ValidationBatches]:
        """Return the batches of each validation dataset by name ("" if there is only one).

        Builds missing token caches. Empty if validation is disabled. `validation.steps` counts
        batches of ``local_batch_size`` samples over all ranks (-1: the whole dataset). The samples
        are therefore the same on every layout.
        """
        if not validation.enable:
            return {}
        named = resolve_sources("validation", validation, validation.sources)
        sets = {}
        for one in named:
            samples = self._packed(one, validation.seq_len)
            name = one.key or validation.dataset_path or one.name
            logger.info(f"validation data {name} {samples}")
            sets[one.key if len(named) > 1 else ""] = ValidationBatches(
                samples,
                local_batch_size=validation.local_batch_size,
                num_batches=validation.steps,
                sharing=(self.dp_rank, self.dp_size),
                with_positions=self.with_positions,
                dataloader=validation.dataloader,
            )
        return sets

    @property
    def _folders(self) -> CacheFolders:
        return CacheFolders(self.data.cache_folder, self.dump_folder)

    def _stream(
        self, source: DataSource, seq_len: int, seed: int | None, makes_windows_ahead: bool
    ) -> StreamedSamples:
        return StreamedSamples(
            self._corpus(source, window_folder(self._folders)),
            self._policy(source),
            seq_len,
            self.data,
            self._folders,
            seed,
            source.max_epochs,
            makes_windows_ahead=makes_windows_ahead,
        )

    def _packed(self, named: NamedSource, seq_len: int) -> PackedSamples:
        tokens = self._tokens(named)
        return self.group.run_on_all(lambda: pack(tokens, seq_len, self.data, self._folders))

    def _tokens(self, named: NamedSource) -> TokenFile:
        """Open the tokens of a source. Tokenize its documents first if they are not in the cache."""
        source, folders, group = named.source, self._folders, self.group
        if source.format == "tokens":
            is_best_fit = self.data.packing == "best_fit"
            return open_token_source(
                source,
                self.tokenizer,
                folders,
                with_documents=self.with_positions or self.data.mask_document_starts or is_best_fit,
                group=group,
                is_recorder=self.is_recorder,
            )
        policy = self._policy(source)

        @functools.cache  # a rank lists its files at most once
        def find_entry() -> tuple[Entry, Corpus]:
            corpus = self._corpus(source)
            name = named.name if len(corpus.files) > 1 else Path(corpus.files[0]).stem
            return entry_of(corpus, name, policy), corpus

        def build(stop: threading.Event) -> TokenFile:
            own_entry, corpus = find_entry()
            return cached_tokens(corpus, policy, own_entry, folders, stop=stop)

        entry: Entry = read_once(group, source.path, lambda: find_entry()[0])
        return build_once(
            group,
            lambda: folders.find(entry.name, entry.open, entry.data_folder),
            build,
            lambda: folders.writable(entry.data_folder),
            str(entry.data_folder / entry.name),
            f"the token cache of {entry.data_folder}",
        )

    def _corpus(self, source: DataSource, downloads: Path | None = None) -> Corpus:
        """Return the documents of a source. downloads: see `find_corpus`."""
        fields = source.text_field, self.data.on_bad_record
        if is_dotted(source.format):
            corpus = user_corpus(
                source.format, source.path, *fields, self.settings, self.dump_folder
            )
        else:
            corpus = find_corpus(source.path, source.format, *fields, downloads)
        if source.processor is None:
            return corpus
        processor = UserProcessor(source.processor, self.settings)
        return dataclasses.replace(corpus, processor=processor)

    def _policy(self, source: DataSource) -> TokenPolicy:
        """Return how documents of ``source`` become tokens. Token files get neither BOS nor EOS."""
        is_text = source.format != "tokens"
        return TokenPolicy(
            self.tokenizer,
            bos_id=self.tokenizer.bos_id if self.data.add_bos and is_text else None,
            eos_id=self.tokenizer.eos_id if self.data.add_eos and is_text else None,
        )

    def _fingerprint(
        self,
        named: Sequence[NamedSource],
        parts: Sequence[PackedSamples | StreamedSamples],
        seed: int,
        changes: Sequence[tuple[int, dict[str, float]]],
    ) -> dict[str, Any]:
        """Return all settings and hashes that determine the tokens at a position of the stream.

        Layout, batch size and the location of the files are not part of them.
        """
        order = (
            f"blocks of {BLOCK_SAMPLES} samples, windows of {WINDOW_BLOCKS} blocks, "
            f"version {PERMUTATION_VERSION}"
        )
        fingerprint: dict[str, Any] = {}
        for one, samples in zip(named, parts, strict=True):
            prefix = f"sources.{one.key}" if one.key else "source"
            policy = self._policy(one.source)
            fingerprint |= {f"{prefix}.{name}": value for name, value in samples.identity.items()}
            fingerprint |= {
                f"{prefix}.text_field": one.source.text_field,
                f"{prefix}.bos" if one.key else "bos": policy.bos_id,
                f"{prefix}.eos" if one.key else "eos": policy.eos_id,
            }
        if len(named) > 1:
            fingerprint |= {f"sources.{one.key}.weight": one.source.weight for one in named}
            fingerprint["sources"] = [one.key for one in named]
            fingerprint["mixture"] = f"patterns of {PATTERN} samples, version {MIXTURE_VERSION}"
        if changes:
            fingerprint["weight_from"] = [[step, weights] for step, weights in changes]
        shuffle = self.data.shuffle
        return fingerprint | {
            "tokenizer": self.tokenizer.fingerprint,
            "packing": parts[0].packing,
            "seq_len": parts[0].seq_len,
            "mask_document_starts": parts[0].mask_document_starts,
            "order": order if shuffle else "as in the files",
            "seed": seed if shuffle else None,
        }


def resolve_sources(
    name: Literal["training", "validation"],
    section: Training | Validation,
    sources: dict[str, DataSource],
) -> list[NamedSource]:
    """Return the sources of a section: ``sources``, else its `dataset_path`, else its `dataset`.

    Raises DataError for an unknown dataset.
    """
    if sources:
        return [NamedSource(key, source, key=key) for key, source in sources.items()]
    dataset = section.dataset
    if section.dataset_path is not None:
        return [NamedSource(dataset, DataSource(path=section.dataset_path))]
    datasets = datasets_for(name)
    entry = datasets.get(dataset)
    if entry is None:
        table = "data.sources" if name == "training" else "validation.sources"
        hints = [
            f"expected one of {', '.join(datasets)}",
            did_you_mean(dataset, datasets),
            f"give your own text as {name}.dataset_path or in [{table}.<name>]",
        ]
        raise DataError(f"{name}.dataset is {dataset!r}: {'; '.join(filter(None, hints))}")
    if entry.note:
        logger.info(f"{name}.dataset: {entry.note}")
    return [NamedSource(dataset, DataSource(path=entry.source_path, streaming=entry.streaming))]


def _supply(named: NamedSource, samples: PackedSamples | StreamedSamples) -> Supply:
    if not samples.num_labels:
        raise DataError(
            f"the source {named.name} {samples} has no labels: each document has only one token. "
            "Expected longer documents, because data.mask_document_starts ignores first tokens: "
            "check the source, or set data.mask_document_starts = false"
        )
    return Supply(
        named.key,
        samples.num_samples,
        samples.num_labels / samples.num_samples,
        named.source.weight,
        # The size of a stream is unknown until it ends.
        0 if named.source.streaming else named.source.max_epochs,
    )


def _weight_changes(named: Sequence[NamedSource]) -> list[tuple[int, dict[str, float]]]:
    """Return ``weight_from`` of all sources by step: (step, new weights by key)."""
    changes: dict[int, dict[str, float]] = {}
    for one in named:
        for step, weight in one.source.weight_from:
            changes.setdefault(int(step), {})[one.key] = weight
    return sorted(changes.items())


def _log_order(
    order: SampleOrder, steps: StepPositions, training: Training, named: Sequence[NamedSource]
) -> None:
    """Log which samples the steps read, and warn of a source with less text than a step reads."""
    of_a_step = order.counts_at(steps.sizes[0][1])
    for supply in order.supplies:
        if of_a_step[supply.key] > supply.num_samples:
            name = supply.key or training.dataset_path or named[0].name
            logger.warning(
                f"{name} has {supply.num_samples:,} samples of {training.seq_len:,} tokens, and each "
                f"step reads {of_a_step[supply.key]:,} from it: a step repeats its text. Expected more "
                "text than one step reads"
            )
    if len(steps.sizes) > 1:
        listed = ", ".join(f"{size:,} from step {first:,}" for first, size in steps.sizes)
        logger.info(f"Samples per step: {listed}")
    if len(named) > 1:
        for start, shares in order.segments():
            listed = ", ".join(f"{key} {share:.2%}" for key, share in shares.items())
            logger.info(
                f"Mixture from step {steps.num_started(start) + 1:,} (sample {start:,}): {listed} "
                "of the samples"
            )
    if order.end is not None:
        logger.info(
            f"The training data end in step {steps.num_started(order.end):,}, "
            f"with sample {order.end:,}"
        )
