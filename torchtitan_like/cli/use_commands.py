"""`titan generate`, `titan eval` and `titan download`: use and get models."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.cli.common import (
    add_import_flag,
    add_json_flag,
    fraction,
    launched_ranks,
    non_negative_int,
    non_negative_number,
    positive_int,
    print_json,
    run_checked,
    step_path,
)
from torchtitan_like.util.exit_codes import WRONG_INPUT
from torchtitan_like.util.output import show_error

if TYPE_CHECKING:
    from torchtitan_like.inference.generation import Completion

DTYPES = ("bfloat16", "float16", "float32", "float64")
DOWNLOAD_FAILED = 1


# ---- titan generate


def configure_generate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "step",
        type=step_path,
        metavar="STEP",
        help="a published step-N, a run (its newest step), or an export",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated"
    )
    add_loading_flags(parser)
    parser.add_argument(
        "--num-tokens",
        type=positive_int,
        default=128,
        metavar="N",
        help="maximum number of tokens to add (default: 128)",
    )
    parser.add_argument(
        "--temperature",
        type=non_negative_number,
        default=0.8,
        metavar="T",
        help="0 always takes the most likely token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=positive_int,
        default=50,
        metavar="K",
        help="sample among the K most likely tokens (default: 50)",
    )
    parser.add_argument(
        "--top-p",
        type=fraction,
        default=1.0,
        metavar="P",
        help="of these, among the fewest that have probability P together (default: 1)",
    )
    parser.add_argument(
        "--seed", type=non_negative_int, default=0, help="of the sampling (default: 0)"
    )
    add_json_flag(parser)
    add_import_flag(parser)
    parser.epilog = (
        "Shows what a run has learned. The config.toml in STEP defines the model and the tokenizer.\n"
        "Reads checkpoints of any layout. Runs in one process, on the GPU if there is one. Prompts\n"
        "are continued one by one, without a cache of keys and values. Prints tokens per second\n"
        "to stderr. A text ends at the tokenizer's end-of-text token, N new tokens, or the\n"
        "end of the model's context. For speed, chats and models that need several GPUs:\n"
        "titan ckpt export, then vLLM or transformers.\n\n"
        'example: titan generate outputs/checkpoint/step-100 --prompt "To be" --num-tokens 16'
    )


def add_loading_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--assets`, `--dtype` and `--ema`, which `inference.load_model` uses."""
    parser.add_argument(
        "--assets", metavar="PATH", help="the tokenizer's folder (default: as in the run's config)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as stored)")
    parser.add_argument(
        "--ema", action="store_true", help="use the averaged weights of [ema] in a step-N"
    )


def run_generate(arguments: argparse.Namespace) -> int:
    """Print the prompts and their continuations. Returns the exit code."""
    if launched_ranks() > 1:
        show_error(
            "titan generate runs in one process. Expected to be started without torchrun: for a "
            "model that needs several GPUs, use titan ckpt export, then vLLM or transformers"
        )
        return WRONG_INPUT
    return run_checked(lambda: _generate(arguments), damage_code=WRONG_INPUT)


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from torchtitan_like.inference.generation import Sampling, complete_all
    from torchtitan_like.inference.load_model import EXPORT_REMEDY, load_checkpoint

    prompts = arguments.prompt or [""]
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    try:
        loaded = load_checkpoint(
            arguments.step,
            assets=arguments.assets,
            custom_import=arguments.custom_import,
            dtype=arguments.dtype,
            averaged=arguments.ema,
        )
        start = time.perf_counter()
        completions = complete_all(
            loaded, prompts, num_tokens=arguments.num_tokens, sampling=sampling
        )
        seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        show_error(
            f"the GPU's memory is too small: {error}. Expected memory for the model and its "
            f"activations: give a shorter --prompt, --dtype bfloat16, or use {EXPORT_REMEDY}"
        )
        return WRONG_INPUT
    _print(prompts, completions, seconds, as_json=arguments.json)
    return 0


def _print(
    prompts: Sequence[str], completions: Sequence[Completion], seconds: float, *, as_json: bool
) -> None:
    """Print texts, or JSON, to stdout, and the speed to stderr."""
    num_tokens = sum(completion.num_tokens for completion in completions)
    each = list(zip(prompts, completions, strict=True))
    if as_json:
        print_json(
            {
                "completions": [
                    {"prompt": prompt, **completion._asdict()} for prompt, completion in each
                ],
                "num_tokens": num_tokens,
                "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
            }
        )
    else:
        text = "\n\n".join(prompt + completion.text for prompt, completion in each)
        # A file or a pipe gets the text itself, a terminal no control characters.
        is_terminal = sys.stdout.isatty()
        print(
            text, file=sys.stdout if is_terminal else getattr(sys.stdout, "unescaped", sys.stdout)
        )
    show_error(
        f"{num_tokens:,} tokens in {seconds:.2f} s: {num_tokens / seconds:,.1f} tokens per second"
    )


# ---- titan eval


def configure_eval(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "step",
        type=step_path,
        metavar="STEP",
        help="a published step-N, a run (its newest step), or an export",
    )
    parser.add_argument(
        "--tasks", required=True, metavar="NAMES", help="tasks, groups or tags, with commas between"
    )
    parser.add_argument(
        "--include-path", type=Path, metavar="DIR", help="folder of YAML files with more tasks"
    )
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="samples of each task (default: all)"
    )
    parser.add_argument(
        "--num-fewshot",
        type=non_negative_int,
        metavar="N",
        help="solved examples before each question (default: as the task defines)",
    )
    parser.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="maximum number of tokens of the model's input (default: the model's)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="append the results to this file (default: eval.jsonl of the run that contains STEP)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=8,
        metavar="N",
        help="texts that are computed together (default: 8)",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="export STEP to this folder and keep it (default: a temporary folder)",
    )
    add_loading_flags(parser)
    add_json_flag(parser)
    add_import_flag(parser)
    parser.epilog = (
        "Needs the packages lm_eval, transformers and accelerate. Exports STEP (see titan ckpt\n"
        "export) and runs lm-eval's backend `hf` on the folder. The temporary folder is in $TMPDIR.\n"
        "Prints a table and appends a row for each task and metric to eval.jsonl. For a model that\n"
        "needs several GPUs: titan ckpt export, then lm_eval with its backend `vllm`.\n\n"
        "example: titan eval outputs/checkpoint/step-100 --tasks next_word --include-path tasks"
    )


def run_eval(arguments: argparse.Namespace) -> int:
    """Print the results. Returns the exit code."""
    if launched_ranks() > 1:
        show_error(
            "titan eval runs in one process. Expected to be started without torchrun: for a model "
            "that needs several GPUs, use titan ckpt export, then lm_eval with its backend vllm"
        )
        return WRONG_INPUT
    return run_checked(lambda: _evaluate(arguments), damage_code=WRONG_INPUT)


def _evaluate(arguments: argparse.Namespace) -> int:
    from torchtitan_like.inference import evaluation
    from torchtitan_like.inference.load_model import read_checkpoint

    step: Path = arguments.step
    output = evaluation.output_file(step, arguments.output)
    tasks = evaluation.Tasks(arguments.tasks.split(","), arguments.include_path)
    manifest = read_checkpoint(step, averaged=arguments.ema)
    if manifest["kind"] == "hf":
        if arguments.export is not None:
            raise evaluation.EvaluationError(
                f"{step} is an export. Expected a step-N with --export: remove the option"
            )
        folder: AbstractContextManager[Path] = nullcontext(step)
    else:
        folder = evaluation.exported(
            step, arguments.export, custom_import=arguments.custom_import, averaged=arguments.ema
        )
    with folder as model:
        results = tasks.evaluate(
            model,
            dtype=arguments.dtype,
            tokenizer=arguments.assets,
            context=arguments.context,
            batch_size=arguments.batch_size,
            limit=arguments.limit,
            num_fewshot=arguments.num_fewshot,
        )
    of_step = {"step": manifest["step"], **({"weights": "ema"} if arguments.ema else {})}
    rows = [{**of_step, **row} for row in results]
    evaluation.append_rows(output, rows)
    if arguments.json:
        print_json(rows)
    else:
        print(evaluation.table_of(rows))
        print(f"\nWritten to {output}")
    return 0


# ---- titan download


def configure_download(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. TorchTitan spells them with underscores."""
    from torchtitan_like.checkpoint.hf.download import ASSETS

    parser.add_argument(
        "--repo-id",
        "--repo_id",
        required=True,
        type=_repo_id,
        metavar="OWNER/NAME",
        help="the model on the Hub",
    )
    parser.add_argument(
        "--assets",
        nargs="+",
        choices=sorted(ASSETS),
        default=["tokenizer", "config"],
        help="what to download (default: tokenizer config)",
    )
    parser.add_argument("--all", action="store_true", help="tokenizer, config and weights")
    parser.add_argument(
        "--additional-patterns",
        "--additional_patterns",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="further file names, with * and ?",
    )
    parser.add_argument(
        "--local-dir",
        "--local_dir",
        type=Path,
        default=Path("assets/hf"),
        metavar="DIR",
        help="folder of all downloaded models (default: assets/hf)",
    )
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument(
        "--hf-token",
        "--hf_token",
        metavar="TOKEN",
        help="access token (default: HF_TOKEN, or the token of 'hf auth login')",
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="only list the files")
    parser.epilog = (
        "Writes the files to DIR/NAME; pass that folder as --model.hf_assets_path. Files that exist\n"
        "and are unchanged are not downloaded again. For a gated model, accept its license on its\n"
        "page first. Returns 0, 1 if the files could not be downloaded, or 2 for wrong input.\n\n"
        "example: titan download --repo-id meta-llama/Llama-3.1-8B --assets tokenizer config"
    )


def _repo_id(text: str) -> str:
    """Parse the name of a model on the Hub; a few old ones have no owner."""
    part = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
    if not re.fullmatch(rf"({part}/)?{part}", text) or "--" in text or ".." in text:
        raise argparse.ArgumentTypeError(
            f"it is {text[:40]!r}. Expected OWNER/NAME, as in the address of the model: correct it"
        )
    return text


def run_download(arguments: argparse.Namespace) -> int:
    """Download the files and list them. Returns the exit code."""
    from torchtitan_like.checkpoint.hf import download as hub

    folder = hub.model_folder(arguments.local_dir, arguments.repo_id)
    assets = sorted(hub.ASSETS) if arguments.all else arguments.assets
    try:
        files = hub.download(
            arguments.repo_id,
            arguments.revision,
            hub.file_patterns(assets, arguments.additional_patterns),
            folder,
            token=arguments.hf_token,
            dry_run=arguments.dry_run,
        )
    except hub.DownloadError as error:
        show_error(f"Cannot download {arguments.repo_id}: {error}")
        return DOWNLOAD_FAILED
    prefix = "would download " if arguments.dry_run else ""
    for name, size in files:
        print(f"{prefix}{folder / name} ({size / 2**20:,.1f} MiB)")
    if not arguments.dry_run:
        print(f"Use it with: --model.hf_assets_path {folder}")
    return 0
