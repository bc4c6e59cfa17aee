"""Download the tokenizer, config and weights of a model from the Hugging Face Hub.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

# Groups of files to download. File names may contain * and ?.
ASSETS = {
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "*tokenizer.model",
        "*tiktoken.model",
        "*.tiktoken",
        "*chat_template*",
    ),
    "config": ("config.json", "generation_config.json"),
    "safetensors": ("*.safetensors", "*.safetensors.index.json"),
    "index": ("*.safetensors.index.json",),
}


class DownloadError(Exception):
    """A download failed. The message gives the reason and the remedy."""


def model_folder(local_dir: Path, repo_id: str) -> Path:
    """Return the folder of a model in `local_dir`: its name on the Hub without the owner."""
    return local_dir / repo_id.split("/")[-1]


def file_patterns(assets: Sequence[str], additional: Sequence[str] = ()) -> list[str]:
    """Return the file name patterns of the given groups of `ASSETS`, then the additional ones."""
    return [pattern for asset in assets for pattern in ASSETS[asset]] + list(additional)


def download(
    repo_id: str,
    revision: str,
    patterns: Sequence[str],
    folder: Path,
    *,
    token: str | None = None,
    dry_run: bool = False,
) -> list[tuple[str, int]]:
    """Download the files of a model that match one of `patterns` into `folder`.

    Files that exist and are unchanged are not downloaded again. dry_run: download nothing.
    Returns names and sizes in bytes. Raises DownloadError without a network, for an unknown or
    gated model, if no file matches, and if the disk is full.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise DownloadError(
            "huggingface_hub is not installed. Expected it for downloads: pip install huggingface_hub"
        ) from error
    try:
        api = huggingface_hub.HfApi(token=token)
        info = api.model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        names = sorted(name for name in sizes if _matches(name, patterns))
        if not names:
            raise DownloadError(
                f"none of the model's {len(sizes)} files matches {', '.join(patterns)}. Expected "
                "at least one file: choose other --assets or --additional-patterns"
            )
        if not dry_run:
            # A commit, not a branch: a push during the download must not mix two versions.
            huggingface_hub.snapshot_download(
                repo_id, revision=info.sha, local_dir=folder, allow_patterns=names, token=token
            )
    except errors.GatedRepoError as error:
        raise DownloadError(
            "the model is gated. Expected an access token of a user who accepted its license: accept "
            f"it at https://huggingface.co/{repo_id}, then give a token (--hf-token, HF_TOKEN or 'hf auth login')"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            "the model does not exist, or your token has no access to it. Expected owner/name: "
            "check the name and the token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"the model has no revision {revision!r}. Expected a branch, tag or commit: check "
            "--revision"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError(
            "HF_HUB_OFFLINE is set. Expected access to the Hub: unset it"
        ) from error
    except DownloadError:
        raise
    except Exception as error:  # network, time-out, full disk: classes differ between releases
        raise DownloadError(
            f"{type(error).__name__}: {error}. If this machine has no access to the Hub, download "
            f"on another machine and copy {folder} to this one. To use a mirror, set HF_ENDPOINT"
        ) from error
    return [(name, sizes[name]) for name in names]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
