"""From the configuration's sections to batches: which text is meant, its tokens, its samples, their order."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.config.sections_training import Data, DataSource, Training, Validation

from .batches import TrainBatches
from .best_fit import pack
from .documents import find_corpus
from .errors import DataError
from .order import BLOCK_SAMPLES, PERMUTATION_VERSION, WINDOW_BLOCKS
from .packing import PackedSamples
from .token_cache import TokenPolicy, cached_tokens
from .token_file import TokenFile
from .tokenizer import Tokenizer
from .validation import ValidationBatches

logger = logging.getLogger()


@dataclass(frozen=True)
class NamedSource:
    """A source and the name it goes by."""

    name: str
    source: DataSource


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
) -> TrainBatches:
    """This rank's share of the training batches, at position 0. Builds the token cache if need be: call it on all
    ranks.

    ``seed`` keys the order of samples. ``with_positions``: tell where each token stands in its document. Raises DataError
    for what is wrong with the texts or their configuration.
    """
    named = resolve_source(
        training.dataset, training.dataset_path, data.sources, section="training", table="data.sources"
    )
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    logger.info(f"Building the tokenizer: {tokenizer.vocab_size:,} tokens, BOS {bos}, EOS {eos}")
    file = _tokens(named, data, tokenizer, dump_folder)
    samples = pack(file, training.seq_len, data, dump_folder)
    batches = TrainBatches(
        samples,
        fingerprint=_fingerprint(named.source, data, tokenizer, samples, seed),
        shuffle_seed=seed if data.shuffle else None,
        max_epochs=named.source.max_epochs,
        local_batch_size=training.local_batch_size,
        num_accumulation=num_accumulation,
        sharing=(dp_rank, dp_size),
        with_positions=with_positions,
    )
    _announce("training", named, samples)
    return batches


def build_validation_batches(
    validation: Validation,
    data: Data,
    *,
    tokenizer: Tokenizer,
    dump_folder: str,
    dp_rank: int,
    dp_size: int,
    with_positions: bool = False,
) -> ValidationBatches:
    """This rank's share of the validation batches. Builds the token cache if need be: call it on all ranks.

    ``validation.steps`` counts batches of ``local_batch_size`` samples over all ranks together (-1: the whole
    text), so that the loss is that of the same samples on every layout. Raises DataError as `build_train_batches`
    does.
    """
    named = resolve_source(
        validation.dataset,
        validation.dataset_path,
        validation.sources,
        section="validation",
        table="validation.sources",
    )
    file = _tokens(named, data, tokenizer, dump_folder)
    samples = pack(file, validation.seq_len, data, dump_folder)
    _announce("validation", named, samples)
    return ValidationBatches(
        samples,
        local_batch_size=validation.local_batch_size,
        num_batches=validation.steps,
        sharing=(dp_rank, dp_size),
        with_positions=with_positions,
    )


def resolve_source(
    dataset: str, dataset_path: str | None, sources: dict[str, DataSource], *, section: str, table: str
) -> NamedSource:
    """The one source that is meant: that of ``sources``, else ``dataset_path``, else where the name ``dataset`` points.

    Raises DataError for an unknown name, for a name that needs a download, and for more than one source.
    """
    if len(sources) > 1:
        raise DataError(
            f"{table} has {len(sources)} entries ({', '.join(sources)}): mixtures are not available yet, expected one"
        )
    if sources:
        return NamedSource(*next(iter(sources.items())))
    if dataset_path is not None:
        return NamedSource(dataset, DataSource(path=dataset_path))
    entry = DATASETS.get(dataset)
    own_text = f"give your own text as {section}.dataset_path or in [{table}.<name>]"
    if entry is None:
        near = get_close_matches(dataset, DATASETS, n=1)
        hint = f", perhaps you meant {near[0]!r}" if near else ""
        raise DataError(f"{section}.dataset is {dataset!r}: expected one of {', '.join(DATASETS)}{hint}; or {own_text}")
    if entry.kind == "hub":
        raise DataError(
            f"{section}.dataset {dataset!r} is a data set of the Hub, which is not available yet: {own_text}"
        )
    if entry.note:
        logger.info(f"{section}.dataset: {entry.note}")
    return NamedSource(dataset, DataSource(path=str(entry.file)))


def _tokens(named: NamedSource, data: Data, tokenizer: Tokenizer, dump_folder: str) -> TokenFile:
    corpus = find_corpus(named.source.path, named.source.format, named.source.text_field)
    policy = TokenPolicy(
        tokenizer, tokenizer.bos_id if data.add_bos else None, tokenizer.eos_id if data.add_eos else None
    )
    name = named.name if len(corpus.files) > 1 else Path(corpus.files[0]).stem
    return cached_tokens(corpus, policy, name=name, cache_folder=data.cache_folder, dump_folder=dump_folder)


def _fingerprint(
    source: DataSource, data: Data, tokenizer: Tokenizer, samples: PackedSamples, seed: int
) -> dict[str, Any]:
    """All that decides which tokens stand at a position: not the layout, the batch size, the place of the files."""
    order = f"blocks of {BLOCK_SAMPLES} samples, windows of {WINDOW_BLOCKS} blocks, version {PERMUTATION_VERSION}"
    meta = samples.file.meta
    return {
        "source.text": f"{meta.text_digest:016x}",
        "source.num_documents": meta.num_documents,
        "source.num_tokens": meta.num_tokens,
        "source.text_field": source.text_field,
        "tokenizer": tokenizer.fingerprint,
        "bos": tokenizer.bos_id if data.add_bos else None,
        "eos": tokenizer.eos_id if data.add_eos else None,
        "packing": samples.packing,
        "seq_len": samples.seq_len,
        "mask_document_starts": data.mask_document_starts,
        "order": order if data.shuffle else "as in the files",
        "seed": seed if data.shuffle else None,
    }


def _announce(what: str, named: NamedSource, samples: PackedSamples) -> None:
    meta = samples.file.meta
    logger.info(
        f"{what} text {named.name} ({samples.file.folder}): {meta.num_documents:,} documents, {meta.num_tokens:,} "
        f"tokens = {samples.num_samples:,} samples of {samples.seq_len:,} tokens per epoch"
    )
