"""Turn the values of training steps into rows, and write metrics.jsonl and validation.jsonl.

`RowCollector.add` does not wait for the device. `RowCollector.collect` makes one copy from the
device and one gather, whatever the number of steps. docs/reference/metrics.md lists the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan_like.monitor.log import logger
from torchtitan_like.util import run_directory
from torchtitan_like.util.files import StorageError, WriteFailures, storage_error
from torchtitan_like.util.jsonl import JsonlFile

Row = dict[str, Any]
# Takes this rank's (steps, columns) float64 CPU tensor, returns (data_ranks, steps, columns).
Gather = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepRecord:
    """Values of one training step on one rank. Its tensors stay on the device until `collect`.

    They are 0-dim unless a shape is given, and must not be changed afterwards.

    num_tokens: tokens read by all ranks. num_other_tokens: tokens read by other replica groups.
    num_valid_tokens: tokens with a label, of all groups that take part.
    local_valid_tokens: labels of this data rank, and of the same rank in other groups.
    loss_share: sum of this data rank's token losses / num_valid_tokens.
    mtp_loss_share: as loss_share, for multi-token prediction (mean over depths); None without it.
    grad_norm: of the whole model, before clipping; equal on all ranks.
    skipped: 1 if the update was skipped, else 0; equal on all ranks.
    lr: learning rate of parameters in no group. group_lr: of each group, by its name.
    data_digest, data_digest_chain: 64-bit digests of the tokens read.
    data_loading_s: seconds that the step waited for its batch.
    position: position in the sample stream before this step.
    local_valid_by_source: labels of this data rank by source; empty without a mixture.
    loss_by_source: (sources,) sums of this data rank's token losses; empty without a mixture.
    """

    step: int
    num_tokens: int
    num_valid_tokens: int
    local_valid_tokens: int
    loss_share: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    lr: float
    data_digest: int
    data_digest_chain: int
    data_loading_s: float
    position: int = 0
    local_valid_by_source: Sequence[int] = ()
    loss_by_source: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    mtp_loss_share: torch.Tensor | None = None
    group_lr: Mapping[str, float] = field(default_factory=dict)
    num_other_tokens: int = 0


class RankLoss(NamedTuple):
    """What one data rank contributes to the losses of a step.

    mean_loss: over its own labels; -inf without any.
    mtp_loss_shares: the loss of multi-token prediction; empty without it.
    loss_by_source, labels_by_source: sums of token losses and numbers of labels, by source.
    """

    loss_share: float
    mean_loss: float
    mtp_loss_shares: Sequence[float]
    loss_by_source: Sequence[float]
    labels_by_source: Sequence[float]

    def encode(self) -> list[float]:
        """Return the values in the order in which ranks exchange them."""
        own = [self.loss_share, self.mean_loss, *self.mtp_loss_shares]
        return [*own, *self.loss_by_source, *self.labels_by_source]

    @classmethod
    def decode(cls, values: Sequence[float]) -> RankLoss:
        """Return the values that `encode` put in order."""
        loss_share, mean_loss, *others = values
        num_mtp = len(others) % 2  # each source has two values
        num_sources = len(others) // 2
        losses = others[num_mtp : num_mtp + num_sources]
        labels = others[num_mtp + num_sources :]
        return cls(loss_share, mean_loss, others[:num_mtp], losses, labels)


class _PendingStep(NamedTuple):
    record: StepRecord
    n_tokens_seen: int
    time: float


class RowCollector:
    """Keeps step records and turns them into rows that are equal on all ranks.

    gather: a collective over the data ranks. sources: names of the sources of a mixture.
    """

    def __init__(self, gather: Gather, sources: Sequence[str] = ()) -> None:
        self.last_row: Row = {}
        self._gather = gather
        self._sources = sources
        self._pending: list[_PendingStep] = []

    def add(self, record: StepRecord, n_tokens_seen: int, time: float) -> None:
        """Keep the values of a step. Does not wait for the device.

        n_tokens_seen: tokens read up to and including this step. time: seconds since 1970.
        """
        # A loss that is not detached keeps its graph alive.
        record = replace(record, loss_share=record.loss_share.detach())
        self._pending.append(_PendingStep(record, n_tokens_seen, time))

    def forget_after(self, step: int) -> list[StepRecord]:
        """Forget the steps after `step`, which run again. Returns their records."""
        forgotten = [pending.record for pending in self._pending if pending.record.step > step]
        self._pending = [pending for pending in self._pending if pending.record.step <= step]
        return forgotten

    def collect(self) -> list[Row]:
        """Return the rows of the steps added since the last call, oldest first. A collective."""
        pending = self._pending
        self._pending = []
        if not pending:
            return []
        values = _copy_to_host([step.record for step in pending])
        num_mtp = int(pending[0].record.mtp_loss_share is not None)
        losses = [
            RankLoss(
                loss_share,
                _mean_loss(step.record, loss_share),
                others[:num_mtp],
                others[num_mtp:],
                step.record.local_valid_by_source,
            )
            for step, (loss_share, _, _, *others) in zip(pending, values, strict=True)
        ]
        # Exact copies are gathered and summed on the host. An all-reduce would round differently
        # with another number of steps in the buffer, and the loss would depend on log_freq.
        local = torch.tensor([loss.encode() for loss in losses], dtype=torch.float64)
        ranks: list[list[list[float]]] = self._gather(local).tolist()
        rows = [
            self._row(step, grad_norm, skipped, [RankLoss.decode(rank) for rank in rank_values])
            for step, (_, grad_norm, skipped, *_), rank_values in zip(
                pending, values, zip(*ranks, strict=True), strict=True
            )
        ]
        self.last_row = rows[-1]
        return rows

    def _row(
        self, step: _PendingStep, grad_norm: float, skipped: float, ranks: list[RankLoss]
    ) -> Row:
        record = step.record
        return {
            "step": record.step,
            "n_tokens_seen": step.n_tokens_seen,
            "num_valid_tokens": record.num_valid_tokens,
            "loss": _exact_sum([rank.loss_share for rank in ranks])
            if record.num_valid_tokens
            else None,
            "max_loss": _max_loss([rank.mean_loss for rank in ranks]),
            **(_mtp_loss(ranks) if record.num_valid_tokens else {}),
            "grad_norm": grad_norm,
            "lr": record.lr,
            **({"group_lr": dict(record.group_lr)} if record.group_lr else {}),
            "data_digest": f"{record.data_digest:016x}",
            "data_digest_chain": f"{record.data_digest_chain:016x}",
            "skipped": int(skipped),
            **self._by_source(ranks),
            "time": step.time,
            "data_loading_s": record.data_loading_s,
            "position": record.position,
            "rank_losses": {
                str(number): None if rank.mean_loss == -math.inf else rank.mean_loss
                for number, rank in enumerate(ranks)
            },
        }

    def _by_source(self, ranks: list[RankLoss]) -> Row:
        """Return the mean loss and the number of labels of each source, if there are sources."""
        if not self._sources:
            return {}
        losses = [
            _exact_sum(values) for values in zip(*(r.loss_by_source for r in ranks), strict=True)
        ]
        labels = [
            _exact_sum(values) for values in zip(*(r.labels_by_source for r in ranks), strict=True)
        ]
        return {
            "sources": {
                name: {"loss": loss / num if num else None, "num_valid_tokens": int(num)}
                for name, loss, num in zip(self._sources, losses, labels, strict=True)
            }
        }


def _copy_to_host(records: Sequence[StepRecord]) -> list[list[float]]:
    """Copy the tensors of all steps in one transfer.

    Returns, for each step, loss_share, grad_norm, skipped, mtp_loss_share if the model has it, and
    the entries of loss_by_source.
    """
    mtp_losses = [r.mtp_loss_share for r in records if r.mtp_loss_share is not None]
    columns = [
        [record.loss_share for record in records],
        [record.grad_norm for record in records],
        [record.skipped for record in records],
        *([mtp_losses] if mtp_losses else []),
        *(list(losses) for losses in zip(*(r.loss_by_source for r in records), strict=True)),
    ]
    device = records[0].loss_share.device  # the norm is on the host if parameters are offloaded
    stacked = [torch.stack(column).to(device, torch.float64) for column in columns]
    values: list[list[float]] = torch.stack(stacked).cpu().T.tolist()
    return values


def _mtp_loss(ranks: list[RankLoss]) -> Row:
    """Return the loss of multi-token prediction, if the model has it."""
    shares = [share for rank in ranks for share in rank.mtp_loss_shares]
    return {"mtp_loss": _exact_sum(shares)} if shares else {}


def _mean_loss(record: StepRecord, loss_share: float) -> float:
    """Return the mean loss over this data rank's own labels, or -inf without labels."""
    if not record.local_valid_tokens:
        return -math.inf
    return loss_share * record.num_valid_tokens / record.local_valid_tokens


def _exact_sum(values: Sequence[float]) -> float:
    """Return the sum, rounded once, so that it does not depend on the order of the terms.

    If the sum overflows or has non-finite terms, returns what IEEE 754 addition gives.
    """
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # an overflow, or inf - inf
        is_nan = any(map(math.isnan, values)) or {math.inf, -math.inf} <= set(values)
        return math.nan if is_nan else math.inf


def _max_loss(means: Sequence[float]) -> float | None:
    """Return the largest mean loss of a data rank: NaN if one is NaN, None if no rank has a label."""
    if any(map(math.isnan, means)):
        return math.nan
    largest = max(means)
    return None if largest == -math.inf else largest


# ---- files of rows


REPLAY_KEYS = ("position", "rank_losses")  # stored only for skipped steps


class FileEnd(NamedTuple):
    """Size of metrics.jsonl in bytes, with the step and data_digest_chain of its last row."""

    num_bytes: int
    step: int | None
    chain: str | None

    def __str__(self) -> str:
        return (
            f"{self.num_bytes} bytes, the last row of step {self.step} "
            f"with data_digest_chain {self.chain}"
        )


class RowFiles:
    """metrics.jsonl and validation.jsonl in a run directory. Rank 0 alone writes them.

    folder: the run directory. attempt: number of this start of the job.
    """

    def __init__(self, folder: Path, attempt: int, failures: WriteFailures) -> None:
        self._folder = folder
        self._attempt = attempt
        self._steps = JsonlFile(folder / run_directory.METRICS, failures)
        self._validation = JsonlFile(folder / run_directory.VALIDATION, failures)

    def append_steps(self, rows: Sequence[Row]) -> None:
        """Append rows to metrics.jsonl."""
        self._steps.append([_stored(row) for row in rows])

    def append_validation(self, row: Row) -> None:
        """Append a row to validation.jsonl."""
        self._validation.append([row])

    def sync(self) -> int:
        """Return the size of metrics.jsonl once it is on disk, or 0 if it cannot be written."""
        return self._steps.byte_offset()

    def check_written(self) -> None:
        """Raise StorageError if rows of past steps are not on disk."""
        try:
            self._validation.require_all()
            self._steps.sync()
        except OSError as error:
            raise StorageError(
                f"The rows of past steps cannot be written: {error}. A checkpoint is published "
                "only after the rows of its steps are on disk, so no checkpoint was saved. "
                "Free space or repair the disk, then start the run again: it repeats the steps "
                "since the last checkpoint"
            ) from error

    def rewind(self, step: int, saved: Mapping[str, Any] | None = None) -> None:
        """Move the rows beyond `step` to `*.discarded-<attempt>.jsonl`. No step occurs twice then.

        saved: summary of the checkpoint of `step`, if it belongs to this run directory. Logs a
        warning if it describes another metrics.jsonl. Raises StorageError.
        """
        for file in (self._steps, self._validation):
            discarded = self._folder / f"{file.path.stem}.discarded-{self._attempt}.jsonl"
            with storage_error(self._folder):
                num_moved = file.rewind(step, discarded)
            if num_moved:
                logger.info(
                    f"Moved {num_moved} rows beyond step {step} "
                    f"from {file.path.name} to {discarded.name}"
                )
        if saved and saved.get("metrics_bytes") and "digest_chain" in saved:
            self._compare(FileEnd(saved["metrics_bytes"], step, f"{saved['digest_chain']:016x}"))

    def close(self) -> None:
        """Write all buffered rows, if possible, and close the files."""
        self._steps.close()
        self._validation.close()

    def _compare(self, expected: FileEnd) -> None:
        """Log a warning if metrics.jsonl ends differently: another run wrote or changed it."""
        size, row = self._steps.size_and_last_row()
        actual = FileEnd(size, row.get("step"), row.get("data_digest_chain"))
        if actual != expected:
            logger.warning(
                f"{self._steps.path} is not the file that this run wrote: it has {actual}. "
                f"The checkpoint of step {expected.step} expects {expected}. New rows are appended "
                "to the file. Look for missing rows in metrics.discarded-*.jsonl"
            )


def _stored(row: Row) -> Row:
    """Return a row as metrics.jsonl stores it."""
    if row["skipped"]:
        return row
    return {key: value for key, value in row.items() if key not in REPLAY_KEYS}
