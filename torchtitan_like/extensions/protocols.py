"""The protocols of the extension points.

Every function receives `settings` last: the registered config sections of user code, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Settings = Mapping[str, Any]


class OptimizerBuilder(Protocol):
    """Builds an optimizer for `optimizer.name` or `optimizer.groups.<name>.name`."""

    def __call__(self, groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
        """Build the optimizer over `groups`, with its whole state.

        groups: for the constructor of torch's optimizers. "params" has pairs (name, parameter) of
            canonical names and of plain tensors or DTensors. "lr" is the peak learning rate;
            "weight_decay" is 0 for parameters of `optimizer.no_weight_decay`. The optimizer keeps
            all keys in its `param_groups`. The trainer sets "lr" before each step.

        The state of a parameter has only tensors, and all of them exist after this call: a
        checkpoint is loaded before the first step. They are on the parameter's device. The state
        of a DTensor is a DTensor or has no dimensions; `torch.zeros_like` returns either.

        Gradients are reduced and clipped before each `step()`. A step with non-finite gradients is
        skipped: the trainer does not call `step()` on a CPU, and restores weights and state on a
        GPU. To read on the GPU whether to skip, derive from `optim.elementwise.GatedOptimizer`.
        """


class LearningRateSchedule(Protocol):
    """The learning rate of each step, for `lr_scheduler.name`."""

    def __call__(self, step: int, total_steps: int, settings: Settings) -> float:
        """Return the factor of the peak learning rates, a finite number >= 0.

        step: from 1. total_steps: `lr_scheduler.total_steps`, or `training.steps` if it is unset.
        The factor depends on the arguments only, so that a resumed run has the same learning rates.
        """


class Loss(Protocol):
    """The loss of each token, for `loss.name`."""

    def __call__(self, logits: Tensor, labels: Tensor, settings: Settings) -> Tensor:
        """Return the loss of each token (tokens,), differentiable with respect to `logits`.

        logits: (tokens, vocab_size), float32, or float64 for a float64 model.
        labels: (tokens,), int64. Ignored labels are 0 here, and their losses are not used.

        The loss of a token depends only on its own row. The trainer calls the function with any
        subset of the tokens, sums the losses of valid labels over all ranks, and divides by their
        number. Therefore every layout computes the same loss.
        """


class Converter(Protocol):
    """Changes the modules of a model, for `model.converters`."""

    def __call__(self, model: nn.Module, settings: Settings) -> None:
        """Change `model` in place: the whole model or a pipeline stage, on the meta device.

        Called before the model is sharded. Names, shapes and dtypes of parameters and of saved
        buffers must stay the same: checkpoints and sharding depend on them.
        """


class DataSource(Protocol):
    """The documents of a dataset, for `data.sources.<name>.format` and `validation.sources`.

    The function or class is called with (path, settings); `path` is the setting of that name. It
    must not read the documents yet: each rank calls it, and so does `titan check`.

    fingerprint: identifies the documents. The token cache and resumed runs compare it. Change it
        with any change of the documents, for example by hashing names, sizes and a version.

    A source has `__getitem__` (a map-style dataset), or `__iter__` (an iterable). Both return
    documents: text, or the record that a `SampleProcessor` takes. A document depends only on its
    number. The trainer tokenizes documents into the token cache, shuffles and packs them, and
    resumes exactly on any number of ranks.
    """

    fingerprint: str

    def __len__(self) -> int:
        """Return the number of documents in an epoch."""

    def __getitem__(self, index: int) -> str | Mapping[str, Any]:
        """Return document `index`, from 0. Several threads may call it."""

    def __iter__(self) -> Iterator[str | Mapping[str, Any]]:
        """Yield all documents. Each iteration yields the same documents in the same order.

        To continue after n documents, n documents are read and dropped.
        """


class SampleProcessor(Protocol):
    """Turns records into text, for `data.sources.<name>.processor`."""

    def __call__(
        self, record: Mapping[str, Any], settings: Settings
    ) -> str | Sequence[tuple[str, bool]]:
        """Return the text of a document, or its parts in order, each with True if it is trained on.

        record: a line of jsonl, a row of a table by column, {"text": ...} for a text file, or the
            document of a `DataSource`.

        The tokens of a part that is not trained on are inputs, and never labels. Each part is
        tokenized by itself. BOS is not trained on, and EOS is if the last part is. Text "" skips
        the record.
        """


class Observer(Protocol):
    """Receives the metrics of a run on rank 0."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Receive a row of metrics.jsonl, once it is written. Rows come at log steps, in order."""

    def on_validation(self, row: Mapping[str, Any]) -> None:
        """Receive a row of validation.jsonl, once it is written."""

    def close(self) -> None:
        """Release resources at the end of the process, also after a crash."""


class ObserverBuilder(Protocol):
    """Builds an observer for `metrics.observers`."""

    def __call__(self, run_folder: Path, settings: Settings) -> Observer:
        """Return the observer. It may write below `run_folder`, which exists."""
