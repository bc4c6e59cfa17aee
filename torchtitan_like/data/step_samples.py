"""Read the samples of one step of a run from a checkpoint and the data."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_like.config import JobConfig
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder, resolve_sources
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.samples.streaming import window_folder
from torchtitan_like.data.text.file_lists import VISIBLE_CACHE_FOLDER_NAME
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.tokens.token_cache import CacheFolders
from torchtitan_like.util.jsonl import read_rows
from torchtitan_like.util.run_directory import METRICS

MAX_STEP = 10**12  # whose positions fit into 64 bits


@dataclass(frozen=True)
class StepSample:
    """One sample of a step.

    position: position in the run's stream of samples.
    source: key of the source's table in the config; "" if the run has one source; None: padding
        after the end of the data.
    epoch, sample: counted from 0 in the source.
    text: the decoded tokens.
    """

    position: int
    source: str | None
    epoch: int
    sample: int
    text: str

    def line(self, width: int | None) -> str:
        """Return a line with the first characters of the text. None: with the whole text."""
        if self.source is None:
            return f"{self.position:>12,}  (padding after the end of the data)"
        text = self.text if width is None else json.dumps(self.text[:width], ensure_ascii=False)
        source = self.source or "text"
        return f"{self.position:>12,}  {source} epoch {self.epoch} sample {self.sample:,}: {text}"


@dataclass(frozen=True)
class StepSamples:
    """What a replica group reads in a step. `digest` is the `data_digest` of its metrics.jsonl.

    Without `[fault_tolerance]` the group has all ranks, and this is the global batch.
    """

    step: int
    samples: list[StepSample]
    num_samples: int
    num_valid_tokens: int
    digest: str


def read_step(
    config: JobConfig, manifest: dict[str, Any], tokenizer: Tokenizer, step: int
) -> StepSamples:
    """Return the samples that a run reads in `step`, before or after the step of its checkpoint.

    manifest: manifest of the checkpoint. A replica group that was lost for some steps reads other
    samples. Builds a missing token cache and writes nothing else.
    Raises DataError, also if the data ends before `step`.
    """
    if step > MAX_STEP:
        raise DataError(
            f"step {step:,} is too large. Expected at most {MAX_STEP:,}: give an earlier one"
        )
    training, data, dump_folder = config.training, config.data, config.job.dump_folder
    sources = resolve_sources("training", training, data.sources)
    is_streamed = any(named.source.streaming for named in sources)
    with tempfile.TemporaryDirectory() as folder:
        if is_streamed:
            # Do not share windows with a run: it deletes each window that it has read.
            _link_downloads(CacheFolders(data.cache_folder, dump_folder), Path(folder))
            if data.cache_folder:
                data = data.model_copy(update={"cache_folder": f"{folder}/{_WINDOWS}"})
            dump_folder = folder
        builder = DataBuilder(data, tokenizer, dump_folder, settings=config.extra_sections)
        # One rank reads whole batches, one sample at a time.
        batches = builder.train_batches(
            training.model_copy(update={"local_batch_size": 1}),
            seed=manifest["seed"],
            global_batch_size=manifest["global_batch_size"],
            makes_windows_ahead=False,
            replica_group=config.fault_tolerance.share,
        )
        _seek(batches, manifest, step)
        positions = batches.next_positions()
        batch = next(batches, None)
    if batch is None:
        raise DataError(
            f"the training data end before step {step}. Expected a step of this run: give an "
            "earlier one"
        )
    return StepSamples(
        step,
        _samples(batches, batch, positions, tokenizer),
        batch.num_samples,
        batch.num_valid_tokens,
        f"{batch.digest:016x}",
    )


def recorded_digest(run: Path, step: int) -> str | None:
    """Return the digest of a step in the run's metrics.jsonl; None if the step has no row."""
    digest = None
    for row in read_rows(run / METRICS):
        if row.get("step") == step and "data_digest" in row:
            digest = row["data_digest"]
    return digest


_WINDOWS = VISIBLE_CACHE_FOLDER_NAME


def _link_downloads(folders: CacheFolders, folder: Path) -> None:
    """Link the files that a run downloaded for its streams into `folder`, without its windows."""
    windows = folder / _WINDOWS
    windows.mkdir()
    for entry in window_folder(folders).glob("[!.]*"):
        if not entry.name.startswith("window-"):
            (windows / entry.name).symlink_to(entry)


def _seek(batches: TrainBatches, manifest: dict[str, Any], step: int) -> None:
    """Go to the start of `step` from the checkpoint, or from the run's start for earlier steps."""
    if step > manifest["step"]:
        batches.load_state_dict(manifest["data"])
        batches.skip(step - manifest["step"] - 1)
        return
    position = manifest["data"]["origin"]["position"]
    if position:
        raise DataError(
            f"the data of this run changed at sample {position:,}. Expected a checkpoint from "
            "before the change for earlier steps: give one"
        )
    batches.check_state(manifest["data"])
    batches.skip(step - 1)


def _samples(
    batches: TrainBatches, batch: Batch, positions: Any, tokenizer: Tokenizer
) -> list[StepSample]:
    """List the samples of a batch. positions: (samples,) int64."""
    order = batches.order
    source_indices, counts = order.locate(positions)
    sample_indices = order.samples_at(positions)
    samples = []
    for row, position in enumerate(positions.tolist()):
        source_index = int(source_indices[row])
        if source_index < 0:
            samples.append(StepSample(position, None, 0, 0, ""))
            continue
        supply = order.supplies[source_index]
        samples.append(
            StepSample(
                position,
                supply.key,
                epoch=int(counts[row] // supply.num_samples),
                sample=int(sample_indices[row] - order.starts[source_index]),
                text=tokenizer.decode(batch.tokens[row, 0].tolist()),
            )
        )
    return samples
