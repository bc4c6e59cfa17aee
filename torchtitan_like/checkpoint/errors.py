"""What can be wrong with a checkpoint, as the two errors that a caller must tell apart."""


class CheckpointError(Exception):
    """A checkpoint cannot be written, found or read; the text says which, why, and what to do."""


class ChangedError(CheckpointError):
    """Settings that make the run have changed since the checkpoint: somebody has to decide."""


class DamagedError(CheckpointError):
    """Bytes of a published checkpoint are missing or not those that were written: an earlier step may do instead."""
