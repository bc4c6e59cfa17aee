"""Texts of the Hugging Face Hub, named as its other tools name them: hf://datasets/OWNER/NAME@REVISION/PATTERN.

PATTERN are the files, as in `en/*.parquet`. REVISION, a tag or better a commit, has to be there: a run that is resumed must
find the text that it began with. What is downloaded lies in the Hub's own cache (HF_HOME), once for all processes that share
it: one downloads, the others wait. When all is there a file beside it says so, and later starts need no network.
"""

from __future__ import annotations

import fcntl
import logging
import re
import time
from fnmatch import fnmatch
from pathlib import Path

import xxhash

from ..errors import DataError

logger = logging.getLogger()

PREFIX = "hf://"
ATTEMPTS, FIRST_PAUSE = 6, 5.0  # seconds; each further pause is twice as long
_PARTS = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)@(?P<revision>[^/]+)/(?P<pattern>.+)")


def local_path(path: str) -> str:
    """``path`` itself, or where the files lie that it names on the Hub, after they were downloaded: a glob.

    Safe to call from any number of processes at once. Raises DataError for a path of another form, and for what cannot be
    downloaded.
    """
    if not path.startswith(PREFIX):
        return path
    parts = _PARTS.fullmatch(path)
    if parts is None:
        raise DataError(
            f"{path!r} names no text of the Hub: expected hf://datasets/OWNER/NAME@REVISION/PATTERN, say "
            "hf://datasets/roneneldan/TinyStories@f54c09f/data/*.parquet; REVISION is a tag or a commit"
        )
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        raise DataError(f"{path!r} is on the Hub, and huggingface_hub is not installed: pip install it") from error
    folder = Path(HF_HUB_CACHE, "torchtitan_like")
    folder.mkdir(parents=True, exist_ok=True)
    complete = folder / xxhash.xxh3_64_hexdigest(path.encode())
    with complete.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            snapshot = _download(path, parts["repo"], parts["revision"], parts["pattern"])
            complete.write_text(snapshot, encoding="utf-8")
        return f"{complete.read_text(encoding='utf-8')}/{parts['pattern']}"


def _download(path: str, repo: str, revision: str, pattern: str) -> str:
    """The folder of the snapshot. Network faults are waited out for minutes; others are told at once."""
    import huggingface_hub
    from huggingface_hub import errors

    final = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.OfflineModeIsEnabled)
    for attempt in range(ATTEMPTS):
        try:
            logger.info(f"downloading {path} (what is there already is not fetched again)")
            info = huggingface_hub.HfApi().dataset_info(repo, revision=revision)
            snapshot = huggingface_hub.snapshot_download(
                repo, repo_type="dataset", revision=info.sha, allow_patterns=[pattern]
            )
            # Without a network the client may return what it has of a snapshot.
            names = [file.rfilename for file in info.siblings or [] if fnmatch(file.rfilename, pattern)]
            missing = [name for name in names if not Path(snapshot, name).exists()]
            if missing:
                raise OSError(f"{len(missing)} of {len(names)} files are missing, {missing[0]} for one")
            return snapshot
        except final as error:
            hint = (
                "check the name, your token (HF_TOKEN) and that its licence is accepted; HF_HUB_OFFLINE must not be set"
            )
            raise DataError(f"{path} cannot be downloaded: {error}; {hint}") from error
        except Exception as error:  # the client's classes of network faults differ between its releases
            if attempt == ATTEMPTS - 1:
                raise DataError(
                    f"{path} was not downloaded in {ATTEMPTS} attempts: {type(error).__name__}: {error}; without access to the "
                    "Hub, download it where there is one and name the files by their path"
                ) from error
            pause = FIRST_PAUSE * 2**attempt
            logger.warning(f"{path}: {type(error).__name__}: {error}; trying again in {pause:.0f} s")
            time.sleep(pause)
    raise AssertionError
