"""Object store URIs, which cannot name the folder of a run or a checkpoint."""

from __future__ import annotations

LOCAL_FOLDER = (
    "a folder, not a URI: a checkpoint is committed by renaming its folder, "
    "which needs a POSIX file system"
)
COPY_LATER = "save to a local or shared folder, and copy finished checkpoints from there with rclone or rsync"


def is_uri(path: str | None) -> bool:
    """Return True for a path that names an object store, such as s3://bucket/run."""
    return path is not None and "://" in path
