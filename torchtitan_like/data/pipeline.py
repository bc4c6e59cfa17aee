"""From the configuration's sections to batches: which text is meant, its tokens, its samples, their order."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from torchtitan_like.config.datasets import datasets_for
from torchtitan_like.config.sections_training import Data, DataSource, Training, Validation
from torchtitan_like.distributed.world import HostGroup

from .batches import TrainBatches
from .best_fit import pack
from .building import build_together
from .errors import DataError
from .formats.documents import Corpus, find_corpus
from .formats.listing import seen_once
from .formats.token_sources import open_token_source
from .formats.tokenizer import Tokenizer
from .mixture import MIXTURE_VERSION, PATTERN, SampleOrder, Supply, seed_of
from .order import BLOCK_SAMPLES, PERMUTATION_VERSION, WINDOW_BLOCKS
from .packing import JoinedSamples, PackedSamples
from .steps import StepPositions
from .streaming import StreamedSamples, folder_of
from .token_cache import Entry, TokenPolicy, cached_entry, entry_of, find_cached, writable_folder
from .token_file import TokenFile
from .validation import ValidationBatches

logger = logging.getLogger()


@dataclass(frozen=True)
class NamedSource:
    """A source and the name it goes by. key: the name of its table, "" for a source that has none."""

    name: str
    source: DataSource
    key: str = ""


def build_train_batches(
    training: Training,
    data: Data,
    *,
    tokenizer: Tokenizer,
    dump_folder: str,
    seed: int,
    dp_rank: int,
    dp_size: int,
    num_accumulation: int,
    with_positions: bool = False,
    group: HostGroup | None = None,
    is_recorder: bool = True,
) -> TrainBatches:
    """This rank's share of the training batches, at position 0. Builds the token caches if need be: call it on all
    ranks.

    ``seed`` keys the order of samples. ``num_accumulation``: micro-batches of a step, once it has its full size.
    ``with_positions``: tell where each token stands in its document. ``group``: of all ranks
    (None: this process is alone). ``is_recorder``: see `RunDigests`. Raises DataError for what is
    wrong with the texts or
    their configuration, and WorkerKilled.
    """
    named = resolve_sources("training", training, data.sources)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    logger.info(f"Building the tokenizer: {tokenizer.vocab_size:,} tokens, BOS {bos}, EOS {eos}")

    ranks = group or HostGroup.alone()

    def samples_of(one: NamedSource) -> PackedSamples | StreamedSamples:
        if one.source.streaming:
            return ranks.everyone_does(lambda: _stream(one, training.seq_len, data, tokenizer, dump_folder, seed))
        tokens = _tokens(one, data, tokenizer, dump_folder, with_positions, ranks, is_recorder)
        return ranks.everyone_does(lambda: pack(tokens, training.seq_len, data, dump_folder))

    parts = list(map(samples_of, named))
    sizes = training.batch_sizes(num_accumulation * dp_size * training.local_batch_size)
    steps = StepPositions(sizes, training.skip_steps)
    changes = _weight_changes(named)
    order = SampleOrder(
        [_supply(one, part) for one, part in zip(named, parts, strict=True)],
        seed=seed if data.shuffle else None,
        changes=[(steps.first_of(step), new) for step, new in changes],
    )
    batches = TrainBatches(
        JoinedSamples(parts),
        order,
        steps,
        fingerprint=_fingerprint(named, data, tokenizer, parts, seed, changes),
        local_batch_size=training.local_batch_size,
        sharing=(dp_rank, dp_size),
        with_positions=with_positions,
        allow_change=data.allow_change,
        dataloader=training.dataloader,
    )
    for one, part in zip(named, parts, strict=True):
        logger.info(f"training text {one.key or training.dataset_path or one.name} {part}")
    if len(sizes) > 1:
        logger.info("Samples per step: " + ", ".join(f"{size:,} from step {first:,}" for first, size in sizes))
    if len(named) > 1:
        for start, shares in order.segments():
            told = ", ".join(f"{key} {share:.2%}" for key, share in shares.items())
            logger.info(f"Mixture from step {steps.num_begun(start) + 1:,} (sample {start:,}): {told} of the samples")
    if order.end is not None:
        logger.info(f"The training text ends in step {steps.num_begun(order.end):,}, with sample {order.end:,}")
    return batches


def build_validation_sets(
    validation: Validation,
    data: Data,
    *,
    tokenizer: Tokenizer,
    dump_folder: str,
    dp_rank: int,
    dp_size: int,
    with_positions: bool = False,
    group: HostGroup | None = None,
    is_recorder: bool = True,
) -> dict[str, ValidationBatches]:
    """This rank's share of the batches of each validation text, by its name ("" where there is only one); none while
    validation is off. Builds the token caches if need be: call it on all ranks.

    ``validation.steps`` counts, in each text, batches of ``local_batch_size`` samples over all ranks together (-1: the
    whole text), so that the loss is that of the same samples on every layout. Raises DataError as `build_train_batches`
    does.
    """
    if not validation.enable:
        return {}
    named = resolve_sources("validation", validation, validation.sources)
    sets = {}
    ranks = group or HostGroup.alone()
    for one in named:
        tokens = _tokens(one, data, tokenizer, dump_folder, with_positions, ranks, is_recorder)
        samples = ranks.everyone_does(functools.partial(pack, tokens, validation.seq_len, data, dump_folder))
        logger.info(f"validation text {one.key or validation.dataset_path or one.name} {samples}")
        sets[one.key if len(named) > 1 else ""] = ValidationBatches(
            samples,
            local_batch_size=validation.local_batch_size,
            num_batches=validation.steps,
            sharing=(dp_rank, dp_size),
            with_positions=with_positions,
            dataloader=validation.dataloader,
        )
    return sets


def resolve_sources(
    name: Literal["training", "validation"], section: Training | Validation, sources: dict[str, DataSource]
) -> list[NamedSource]:
    """The sources that a section of that name means: ``sources``, else its ``dataset_path``, else where its ``dataset`` points.

    Raises DataError for an unknown data set.
    """
    dataset = section.dataset
    if sources:
        return [NamedSource(key, source, key=key) for key, source in sources.items()]
    if section.dataset_path is not None:
        return [NamedSource(dataset, DataSource(path=section.dataset_path))]
    known = datasets_for(name)
    entry = known.get(dataset)
    if entry is None:
        near = get_close_matches(dataset, known, n=1)
        hint = f", perhaps you meant {near[0]!r}" if near else ""
        table = "data.sources" if name == "training" else "validation.sources"
        own_text = f"give your own text as {name}.dataset_path or in [{table}.<name>]"
        raise DataError(f"{name}.dataset is {dataset!r}: expected one of {', '.join(known)}{hint}; or {own_text}")
    if entry.note:
        logger.info(f"{name}.dataset: {entry.note}")
    return [NamedSource(dataset, DataSource(path=entry.source_path, streaming=entry.streaming))]


def _stream(
    named: NamedSource, seq_len: int, data: Data, tokenizer: Tokenizer, dump_folder: str, seed: int
) -> StreamedSamples:
    source, downloads = named.source, folder_of(data, dump_folder)
    corpus = find_corpus(source.path, source.format, source.text_field, data.on_bad_record, downloads)
    policy, key = _policy(source, data, tokenizer), seed_of(named.key, seed) if data.shuffle else None
    return StreamedSamples(corpus, policy, seq_len, data, dump_folder, key, source.max_epochs)


def _tokens(
    named: NamedSource,
    data: Data,
    tokenizer: Tokenizer,
    dump_folder: str,
    with_positions: bool,
    group: HostGroup,
    is_recorder: bool = True,
) -> TokenFile:
    source = named.source
    places: dict[str, Any] = {"cache_folder": data.cache_folder, "dump_folder": dump_folder}
    if source.format == "tokens":
        with_documents = with_positions or data.mask_document_starts or data.packing == "best_fit"
        return open_token_source(
            source, tokenizer, with_documents=with_documents, group=group, is_recorder=is_recorder, **places
        )
    policy = _policy(source, data, tokenizer)

    @functools.cache  # a rank lists its files at most once
    def look() -> tuple[Entry, Corpus]:
        corpus = find_corpus(source.path, source.format, source.text_field, data.on_bad_record)
        name = named.name if len(corpus.files) > 1 else Path(corpus.files[0]).stem
        return entry_of(corpus, name, policy), corpus

    entry: Entry = seen_once(group, source.path, lambda: look()[0])

    def build(stop: threading.Event) -> TokenFile:
        return cached_entry(*look(), policy, stop=stop, **places)

    return build_together(
        group,
        lambda: find_cached(entry.name, entry.open, beside=entry.beside, **places),
        build,
        lambda: writable_folder(beside=entry.beside, **places)[0],
        str(entry.beside / entry.name),
        f"the token cache of {entry.beside}",
    )


def _supply(named: NamedSource, samples: PackedSamples | StreamedSamples) -> Supply:
    if not samples.num_labels:
        raise DataError(
            f"the text {named.name} {samples} has nothing to be learnt: each of its documents has one token, and the first "
            "of a document is no label (data.mask_document_starts)"
        )
    return Supply(
        named.key,
        samples.num_samples,
        samples.num_labels / samples.num_samples,
        named.source.weight,
        0 if named.source.streaming else named.source.max_epochs,  # a stream knows its end when it is there
    )


def _weight_changes(named: Sequence[NamedSource]) -> list[tuple[int, dict[str, float]]]:
    """``weight_from`` of all sources together: steps, and the weights by key that hold from there on."""
    changes: dict[int, dict[str, float]] = {}
    for one in named:
        for step, weight in one.source.weight_from:
            changes.setdefault(int(step), {})[one.key] = weight
    return sorted(changes.items())


def _policy(source: DataSource, data: Data, tokenizer: Tokenizer) -> TokenPolicy:
    """What is put around a document of ``source``: nothing, where its tokens are read as they stand."""
    adds = source.format != "tokens"
    bos_id = tokenizer.bos_id if data.add_bos and adds else None
    return TokenPolicy(tokenizer, bos_id, tokenizer.eos_id if data.add_eos and adds else None)


def _fingerprint(
    named: Sequence[NamedSource],
    data: Data,
    tokenizer: Tokenizer,
    parts: Sequence[PackedSamples | StreamedSamples],
    seed: int,
    changes: Sequence[tuple[int, dict[str, float]]],
) -> dict[str, Any]:
    """All that decides which tokens stand at a position: not the layout, the batch size, the place of the files."""
    order = f"blocks of {BLOCK_SAMPLES} samples, windows of {WINDOW_BLOCKS} blocks, version {PERMUTATION_VERSION}"
    fingerprint: dict[str, Any] = {}
    for one, samples in zip(named, parts, strict=True):
        prefix = f"sources.{one.key}" if one.key else "source"
        policy = _policy(one.source, data, tokenizer)
        fingerprint |= {f"{prefix}.{name}": value for name, value in samples.identity.items()} | {
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
    return fingerprint | {
        "tokenizer": tokenizer.fingerprint,
        "packing": parts[0].packing,
        "seq_len": parts[0].seq_len,
        "mask_document_starts": parts[0].mask_document_starts,
        "order": order if data.shuffle else "as in the files",
        "seed": seed if data.shuffle else None,
    }
