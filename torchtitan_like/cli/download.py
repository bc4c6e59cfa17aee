"""`titan download`: download a model's tokenizer, config and weights from the Hugging Face Hub."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torchtitan_like.checkpoint.hf.download import ASSETS
from torchtitan_like.util.output import show_error

DOWNLOAD_FAILED = 1


def configure_download(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. TorchTitan spells them with underscores."""
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
    assets = sorted(ASSETS) if arguments.all else arguments.assets
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
