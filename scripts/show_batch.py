"""Show exactly what a step has read, or will read: `python scripts/show_batch.py STEP_DIR --step 1203`.

STEP_DIR is any published step of the run (`outputs/checkpoint/step-1000`), before or after the step that is asked for;
texts and tokenizer are those of the `config.toml` inside it, and have to be where they were (settings can be given as
for training: --data.sources.wiki.path ...). Nothing is trained or written, apart from a token cache that is missing.

Prints one line a sample: its position in the stream, its source, the epoch, its number in the source, its first words.
The digest is that of metrics.jsonl; where the run's file is found, the two are compared (exit code 1 if they differ).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.step_folders import read_manifest
from torchtitan_like.config import ConfigError, JobConfig, load_stored_config
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.data.batches.training import TrainBatches
from torchtitan_like.data.build import build_train_batches, resolve_sources
from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.text.documents import VISIBLE_CACHE_FOLDER_NAME
from torchtitan_like.data.text.tokenizer import Tokenizer, load_tokenizer
from torchtitan_like.util.jsonl import read_rows

WIDTH = 100  # characters of a sample that are shown


def build(config: JobConfig, manifest: dict[str, Any], tokenizer: Tokenizer) -> TrainBatches:
    """The run's batches, each whole: as one rank reads them, sample by sample."""
    training = config.training.model_copy(update={"local_batch_size": 1})
    return build_train_batches(
        training,
        config.data,
        tokenizer=tokenizer,
        dump_folder=config.job.dump_folder,
        seed=manifest["seed"],
        dp_rank=0,
        dp_size=1,
        num_accumulation=manifest["global_batch_size"],
    )


def with_windows_of_its_own(config: JobConfig, folder: Path) -> JobConfig:
    """Another place for the windows of streams: a run may be reading its own, and what lies behind a reader is deleted."""
    place = folder / VISIBLE_CACHE_FOLDER_NAME
    place.mkdir()
    for entry in streaming.window_folder(config.data, config.job.dump_folder).glob("[!.]*"):
        if not entry.name.startswith("window-"):
            (place / entry.name).symlink_to(entry)
    data = config.data.model_copy(update={"cache_folder": str(place)} if config.data.cache_folder else {})
    job = config.job.model_copy(update={"dump_folder": str(folder)})
    return config.model_copy(update={"data": data, "job": job})


def read(
    config: JobConfig, manifest: dict[str, Any], tokenizer: Tokenizer, step: int
) -> tuple[TrainBatches, np.ndarray, Batch | None]:
    """The run's batches, behind those of `step`; the positions that it reads, and its batch, None behind the text's end."""
    named = resolve_sources("training", config.training, config.data.sources)
    # No window ahead is made either: nothing is read on.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(streaming, "NUM_AHEAD", 0):
        if any(one.source.streaming for one in named):
            config = with_windows_of_its_own(config, Path(folder))
        batches = build(config, manifest, tokenizer)
        seek(batches, manifest, step)
        return batches, batches.next_positions(), next(batches, None)


def seek(batches: TrainBatches, manifest: dict[str, Any], step: int) -> None:
    """Go to where `step` begins: from the checkpoint on, or, for an earlier one, from the start of the run."""
    if step > manifest["step"]:
        batches.load_state_dict(manifest["data"])
        batches.pass_over(step - manifest["step"] - 1)
        return
    origin = manifest["data"]["origin"]
    if origin["position"]:
        raise DataError(
            f"the data of this run were changed at sample {origin['position']:,}: for steps before that give a checkpoint "
            "from before the change"
        )
    batches.check_state(manifest["data"])
    batches.pass_over(step - 1)


def lines_of(
    batches: TrainBatches, batch: Batch, positions: np.ndarray, tokenizer: Tokenizer, whole: bool
) -> list[str]:
    """One line a sample, or all of its text."""
    source, count = batches.order.locate(positions)
    samples = batches.order.samples_at(positions)
    lines = []
    for row, position in enumerate(positions.tolist()):
        if source[row] < 0:
            lines.append(f"{position:>12,}  (behind the end: padding)")
            continue
        supply = batches.order.supplies[source[row]]
        number = samples[row] - batches.order.starts[source[row]]
        text = tokenizer.decode(batch.tokens[row, 0].tolist())
        shown = text if whole else json.dumps(text[:WIDTH], ensure_ascii=False)
        where = f"{supply.key or 'text'} epoch {count[row] // supply.num_samples} sample {number:,}"
        lines.append(f"{position:>12,}  {where}: {shown}")
    return lines


def recorded_digest(folder: Path, step: int) -> str | None:
    """What the run's metrics.jsonl says of the step."""
    found = None
    for row in read_rows(folder / "metrics.jsonl"):
        if row.get("step") == step and "data_digest" in row:
            found = row["data_digest"]
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step_dir", type=Path, help="a published checkpoint, such as outputs/checkpoint/step-300")
    parser.add_argument("--step", type=int, required=True, help="the step to show, from 1")
    parser.add_argument("--whole", action="store_true", help="print the whole text of each sample")
    arguments, settings = parser.parse_known_args(argv)
    if arguments.step < 1:
        parser.error("--step counts from 1")
    try:
        manifest = read_manifest(arguments.step_dir)
        if manifest is None or "data" not in manifest:
            raise CheckpointError(f"{arguments.step_dir} is not a step of a run: it has no manifest.json with its data")
        config = load_stored_config(arguments.step_dir / "config.toml", settings)
        tokenizer = load_tokenizer(config.model.tokenizer_folder)
        batches, positions, batch = read(config, manifest, tokenizer, arguments.step)
    except (ConfigError, TokenizerError, CheckpointError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    if batch is None:
        print(f"the training text ends before step {arguments.step}", file=sys.stderr)
        return 2
    print("\n".join(lines_of(batches, batch, positions, tokenizer, arguments.whole)))
    print(
        f"step {arguments.step}: {batch.num_samples} samples, {batch.num_valid_tokens:,} labels, digest {batch.digest:016x}"
    )
    recorded = recorded_digest(arguments.step_dir.parent.parent, arguments.step)
    if recorded is None:
        return 0
    same = recorded == f"{batch.digest:016x}"
    print(f"metrics.jsonl of the run: {recorded}, {'the same' if same else 'ANOTHER: the run has read other samples'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
