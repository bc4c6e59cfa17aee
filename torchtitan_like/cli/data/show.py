"""`titan data show`: print the samples that a step of a run has read, or will read."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import FAILED, add_json_flag, positive_int, run_checked
from torchtitan_like.util.run_directory import CONFIG

if TYPE_CHECKING:
    from torchtitan_like.data.step_samples import StepSample

DIFFERENT = 1
WIDTH = 100  # characters of a sample that are printed


def configure_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "%(prog)s CHECKPOINT --step N [--whole] [--json] [--section.key VALUE ...]"
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a published step-N of the run, before or after the step to print",
    )
    parser.add_argument(
        "--step", type=positive_int, required=True, metavar="N", help="the step to print, from 1"
    )
    parser.add_argument("--whole", action="store_true", help="print the whole text of each sample")
    add_json_flag(parser)
    parser.epilog = (
        "Prints one line for each sample: its position in the run's stream of samples, source,\n"
        "epoch, index in the source and first words. The config.toml in CHECKPOINT defines data\n"
        "and tokenizer; settings such as --data.sources.wiki.path change their paths. Does not\n"
        "train, and writes only a missing token cache.\n"
        "Compares the digest with the run's metrics.jsonl, if it exists: returns 0 if they are\n"
        "equal, 1 if not, 2 after an error.\n\n"
        "example: titan data show outputs/checkpoint/step-100 --step 3"
    )


def run_show(arguments: argparse.Namespace) -> int:
    """Print the samples. Returns the exit code."""
    return run_checked(lambda: _show(arguments), damage_code=FAILED)


def _show(arguments: argparse.Namespace) -> int:
    from torchtitan_like.checkpoint.errors import CheckpointError
    from torchtitan_like.checkpoint.step_folders import read_manifest, suggest_step
    from torchtitan_like.data.step_samples import read_step, recorded_digest
    from torchtitan_like.data.text.tokenizer import load_tokenizer
    from torchtitan_like.stored_config import custom_import_in, find_assets, load_trusted

    checkpoint = arguments.checkpoint
    manifest = read_manifest(checkpoint)
    if manifest is None or "data" not in manifest:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of a run. Expected a step-N with a "
            f"manifest.json that has a data position: {suggest_step(checkpoint)}"
        )
    module = custom_import_in(arguments.settings)
    config = load_trusted(checkpoint / CONFIG, module, arguments.settings)
    tokenizer = load_tokenizer(find_assets(config.model.tokenizer_folder, checkpoint))
    content = read_step(
        config.training,
        config.data,
        config.job.dump_folder,
        manifest,
        tokenizer,
        arguments.step,
        config.extra_sections,
        config.fault_tolerance.share,
    )
    recorded = recorded_digest(checkpoint.parent.parent, arguments.step)
    code = 0 if recorded in (None, content.digest) else DIFFERENT
    if arguments.json:
        print(json.dumps({**asdict(content), "recorded_digest": recorded}, indent=2))
        return code
    for sample in content.samples:
        print(_line(sample, arguments.whole))
    print(
        f"step {content.step}: {content.num_samples} samples, {content.num_valid_tokens:,} labels, "
        f"digest {content.digest}"
    )
    if recorded is not None:
        verdict = "DIFFERENT: the run has read other samples" if code else "the same"
        print(f"metrics.jsonl of the run: {recorded}, {verdict}")
    return code


def _line(sample: StepSample, whole: bool) -> str:
    if sample.source is None:
        return f"{sample.position:>12,}  (padding after the end of the data)"
    text = sample.text if whole else json.dumps(sample.text[:WIDTH], ensure_ascii=False)
    source = sample.source or "text"
    return f"{sample.position:>12,}  {source} epoch {sample.epoch} sample {sample.sample:,}: {text}"
