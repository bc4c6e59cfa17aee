"""Try the extensions of a run: call each of them once, on small inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torchtitan_like.check.model import parameter_names
from torchtitan_like.config.problems import Problem
from torchtitan_like.extensions.converters import convert
from torchtitan_like.extensions.optimizers import try_optimizer
from torchtitan_like.extensions.trials import try_loss, try_schedule
from torchtitan_like.extensions.used import Use, uses
from torchtitan_like.util.modules import describe_line
from torchtitan_like.util.registry import Kind, is_registered, label

if TYPE_CHECKING:
    from torchtitan_like.check.context import RunContext

# Sharding role -> number of dimensions of the weight, if it is not 1.
NUM_DIMENSIONS = {
    "vocab_embedding": 2,
    "column": 2,
    "row": 2,
    "output": 2,
    "latent": 2,
    "projection": 2,
    "router": 2,
    "experts": 3,
}
EXAMPLES = 12  # parameters for which an optimizer is tried


def _try_optimizer(run: RunContext, use: Use) -> None:
    assert run.spec is not None
    dimensions = []
    for name in parameter_names(run)[1][:EXAMPLES]:
        role = next((role for glob, role in run.spec.sharding if fnmatchcase(name, glob)), "")
        dimensions.append((name, NUM_DIMENSIONS.get(role, 1)))
    try_optimizer(use.name, dimensions, run.config.extra_sections)


def _try_schedule(run: RunContext, use: Use) -> None:
    total_steps = run.config.lr_scheduler.total_steps or run.config.training.steps
    try_schedule(use.name, total_steps, run.config.extra_sections)


def _try_loss(run: RunContext, use: Use) -> None:
    try_loss(use.name, run.size("vocab_size"), run.config.extra_sections)


def _try_converter(run: RunContext, use: Use) -> None:
    """Convert the whole model on the meta device."""
    import torch

    assert run.spec is not None
    with torch.device("meta"):
        model = run.spec.build(run.args)
    convert(use.name, model, run.config.extra_sections)


def _try_source(run: RunContext, use: Use) -> None:
    """Open the source, and read its first document with the processor."""
    from torchtitan_like.data.text.documents import find_corpus, first_document, user_corpus
    from torchtitan_like.data.text.hub import PREFIX
    from torchtitan_like.data.text.user_documents import UserProcessor

    source = run.config.value_of(use.key.rpartition(".")[0])
    fields = source.text_field, run.config.data.on_bad_record
    settings, folder = run.config.extra_sections, run.config.job.dump_folder
    processor = source.processor and UserProcessor(source.processor, settings)
    if is_registered("data_source", source.format):
        corpus = user_corpus(source.format, source.path, *fields, settings, folder)
        if not len(corpus.documents or ()):
            raise ValueError(f"{corpus} has no documents")
    elif source.path.startswith(PREFIX) or not os.path.exists(source.path):
        return  # to download, a glob, or reported by the checks of files
    else:
        corpus = find_corpus(source.path, source.format, *fields)
    first_document(replace(corpus, processor=processor))


TRIALS: dict[Kind, Callable[[RunContext, Use], None]] = {
    "optimizer": _try_optimizer,
    "lr_schedule": _try_schedule,
    "loss": _try_loss,
    "data_source": _try_source,
    "sample_processor": _try_source,
    "converter": _try_converter,
}


def check_extensions(run: RunContext) -> Iterator[Problem]:
    """Check that the registered functions of this run follow their protocols."""
    if run.spec is None:
        return
    for use in uses(run.config):
        if use.kind not in TRIALS:
            continue
        try:
            TRIALS[use.kind](run, use)
        except Exception as error:  # user code may raise anything
            reason = f"{type(error).__name__}: {error}{describe_line(error)}"
            expected = f"a {label(use.kind)} that works on small inputs; {reason}"
            remedy = "correct it (docs/guides/extensions.md has the protocol)"
            yield Problem(use.key, None, expected, remedy)
