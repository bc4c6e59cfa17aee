"""Export a published step as a Hugging Face directory, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf.folder import write_model
from torchtitan_like.checkpoint.loading import load_stored_weights
from torchtitan_like.checkpoint.saving import check_space
from torchtitan_like.checkpoint.staged_output import StagedOutput
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.step_folders import read_manifest, suggest_step
from torchtitan_like.checkpoint.stored_weights import check_average
from torchtitan_like.checkpoint.tools.convert import Identify
from torchtitan_like.checkpoint.verification import verify_together
from torchtitan_like.distributed.world import HostGroup, launched_as
from torchtitan_like.util.extents import write_file
from torchtitan_like.util.files import refuse_existing
from torchtitan_like.util.run_directory import CONFIG

SHARD_GB = 5
TIMEOUT = timedelta(hours=2)  # long enough for the slowest rank's disk


@contextmanager
def launched_group() -> Iterator[HostGroup]:
    """Join the ranks of a checkpoint command on the CPU; only rank 0 logs at level INFO."""
    launched = launched_as()
    level = logging.INFO if launched.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    if launched.world_size > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    group = HostGroup(list(range(launched.world_size)), TIMEOUT)
    try:
        yield group
    finally:
        group.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


def export_step(
    step: Path,
    out: Path,
    group: HostGroup,
    *,
    identify: Identify,
    dtype: torch.dtype | None = None,
    shard_gb: float | None = None,
    averaged: bool = False,
) -> None:
    """Write weights, config and tokenizer to `out`. All ranks call it together.

    The step's config.toml defines the model and the tokenizer. Each rank loads some of the tensors.

    dtype: target dtype of floating-point weights; None keeps their dtypes.
    averaged: export the averaged weights (`[ema]`).
    shard_gb: maximum GB of weights per file; None: as in the index of the model's assets, else 5.

    Raises CheckpointError, and the errors of `identify`.
    """
    manifest = read_manifest(step)
    if manifest is None or manifest["kind"] == "hf":
        raise CheckpointError(
            f"{step} is not a published step. Expected a step-N, full or weights only: "
            f"{suggest_step(step)}"
        )
    if averaged:
        check_average(step, manifest)
    identity, _ = identify(step)
    output = StagedOutput(out)
    with ExitStack() as stack:

        def stage() -> Path:
            stack.enter_context(output)
            refuse_existing(out)
            output.path.mkdir()
            return output.path

        staged = group.run_on_leader(stage)
        reason = "named on the command line"
        start = Start("warm", 0, step, reason, manifest=manifest, averaged=averaged)
        weights = load_stored_weights(start, group, identity)
        group.run_on_leader(lambda: check_space(staged, weights.num_bytes))
        files = write_model(
            staged,
            weights.state_dict(),
            identity,
            group,
            dtype=dtype,
            shard_bytes=round((shard_gb or SHARD_GB) * 1e9),
            by_index=not shard_gb,
        )
        config = (step / CONFIG).read_bytes()
        files[CONFIG] = group.run_on_leader(lambda: write_file(staged / CONFIG, config))
        verify_together(staged, files, group)
        content = {"kind": "hf", "step": manifest["step"], "files": files}
        group.run_on_leader(lambda: output.publish(content))
