"""Download a model's tokenizer, config and weights from the Hugging Face Hub.

    python scripts/download_assets.py --repo_id meta-llama/Llama-3.1-8B --assets tokenizer
    python scripts/download_assets.py --repo_id meta-llama/Llama-3.1-8B --all --hf_token hf_...

The files land in `<local_dir>/<name of the model>`; give that folder to `--model.hf_assets_path`. What is there already
and unchanged is not downloaded again. For a gated model accept its licence on its page first.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path

ASSETS = {
    "tokenizer": (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "vocab.txt", "merges.txt", "*tokenizer.model", "*.tiktoken",
    ),
    "config": ("config.json", "generation_config.json"),
    "safetensors": ("*.safetensors", "*.safetensors.index.json"),
    "index": ("*.safetensors.index.json",),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    patterns = [pattern for asset in options.assets for pattern in ASSETS[asset]] + options.additional_patterns
    folder = Path(options.local_dir) / options.repo_id.split("/")[-1]
    try:
        files = download(options.repo_id, options.revision, patterns, folder, options.hf_token, options.dry_run)
    except DownloadError as error:
        print(f"Nothing more was downloaded from {options.repo_id}: {error}", file=sys.stderr)
        return 1
    for name, size in files:
        print(f"{'would download ' if options.dry_run else ''}{folder / name} ({size / 2**20:,.1f} MiB)")
    if not options.dry_run:
        print(f"Use it with: --model.hf_assets_path {folder}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo_id", required=True, help="the model on the Hub, as owner/name")
    parser.add_argument("--assets", nargs="+", choices=sorted(ASSETS), default=["tokenizer", "config"])
    parser.add_argument("--all", action="store_true", help="tokenizer, config and weights")
    parser.add_argument("--additional_patterns", nargs="+", default=[], help="further file names, with * and ?")
    parser.add_argument("--local_dir", default="assets/hf", help="default: assets/hf")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    parser.add_argument("--hf_token", help="access token (default: the one of 'hf auth login', or HF_TOKEN)")
    parser.add_argument("--dry_run", action="store_true", help="only list what would be downloaded")
    options = parser.parse_args(argv)
    if options.all:
        options.assets = sorted(ASSETS)
    return options


class DownloadError(Exception):
    """Why the files could not be had, and what to do about it."""


def download(
    repo_id: str, revision: str, patterns: list[str], folder: Path, token: str | None, dry_run: bool
) -> list[tuple[str, int]]:
    """Fetch the repository's files that match one of ``patterns``; their names and sizes in bytes.

    DownloadError without a network, for an unknown or a gated repository, a missing file, a full disk.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise DownloadError("huggingface_hub is not installed; try: pip install huggingface_hub") from error
    try:
        info = huggingface_hub.HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True)
        listed = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = sorted(name for name in listed if any(fnmatch(name, pattern) for pattern in patterns))
        if not wanted:
            raise DownloadError(f"none of its {len(listed)} files matches {', '.join(patterns)}")
        if not dry_run:
            # By commit: all files are of one state, whatever is pushed meanwhile.
            huggingface_hub.snapshot_download(
                repo_id, revision=info.sha, local_dir=folder, allow_patterns=wanted, token=token
            )
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"it is gated. Accept its licence at https://huggingface.co/{repo_id}, then give an access token "
            "(--hf_token, HF_TOKEN or 'hf auth login')"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError("there is no such model, or your token may not see it. Expected is owner/name") from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"it has no revision {revision!r}") from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError("HF_HUB_OFFLINE is set; unset it to download") from error
    except DownloadError:
        raise
    except Exception as error:  # no network, time-outs, a full disk: the client's classes differ between its releases
        raise DownloadError(
            f"{type(error).__name__}: {error}. Without access to the Hub, run this where there is one and copy "
            f"{folder} here; behind a mirror, set HF_ENDPOINT"
        ) from error
    return [(name, listed[name]) for name in wanted]


if __name__ == "__main__":
    sys.exit(main())
