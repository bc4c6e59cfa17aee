"""What a run starts from, and what differs from the settings that are stored there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_like.checkpoint.changes import (
    check_changes,
    diff_settings,
    warm_differences,
)
from torchtitan_like.checkpoint.fingerprint import resume_line
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.torchtitan import check_data_choice
from torchtitan_like.util.output import on_screen

logger = logging.getLogger()


class Origin:
    """The start of a run: the first of `starts`, or an older one if that is damaged.

    settings: all settings of this run, by dotted key. args: the sizes of its model. numeric: its
    `numeric_fingerprint`. global_batch_size: of this run.
    Raises ChangedError if settings that shape the run have changed.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        settings: Mapping[str, Any],
        args: Any,
        numeric: dict[str, Any],
        *,
        global_batch_size: int,
    ) -> None:
        self.numeric = numeric
        self._settings = settings
        self._args = args
        self._global_batch_size = global_batch_size
        self.starts = starts
        self.start_from(starts[0])

    def start_from(self, start: Start) -> None:
        """Start from this one. Raises ChangedError if settings that shape the run have changed."""
        logger.info(str(start), extra=on_screen())
        self._differences = self._compare(start)
        self.start = start

    def stored(self, key: str) -> Any:
        """Return an entry of the manifest that the run resumes from, or None."""
        manifest = self.start.manifest or {}
        return manifest.get(key) if self.start.kind == "resume" else None

    def own_manifest(self, folder: Path) -> dict[str, Any] | None:
        """Return the manifest of a step in the run's own `folder` that it resumes; else None."""
        start = self.start
        is_own = start.path is not None and start.path.parent == folder
        return start.manifest or {} if start.kind == "resume" and is_own else None

    @property
    def is_new(self) -> bool:
        """Whether the weights, or those of new experts, come from the seed."""
        return self.start.kind == "scratch" or self.start.upcycles

    @property
    def initializes(self) -> bool:
        """Whether the model's weights are drawn from the seed, before a checkpoint is loaded."""
        return self.is_new or "model" in self._settings["checkpoint.exclude_from_loading"]

    def summary(self) -> dict[str, Any]:
        """Return an entry for manifests: the dense checkpoint from which the run was upcycled."""
        path = str(self.start.path) if self.start.upcycles else self.stored("upcycled_from")
        return {} if path is None else {"upcycled_from": path}

    def warn_of_another_model(self, tokenizer: str) -> None:
        """Warn if other settings than this run's trained the weights of a warm start.

        tokenizer: fingerprint of the run's tokenizer.
        """
        stored = self.start.manifest or {}
        if self.start.kind != "warm" or "config" not in stored:
            return
        changes = warm_differences(stored, self._settings, self._args, tokenizer)
        if changes:
            logger.warning(
                f"The weights in {self.start.path} were trained with other settings: "
                f"{'; '.join(map(str, changes))}. Expected the same model and tokenizer. Restore "
                "them, unless the change is intended"
            )

    def log_resume(self, data_changes: Sequence[str]) -> None:
        """Log whether a resumed run repeats the one that it continues.

        data_changes: names of the datasets that differ.
        """
        if self.start.kind == "resume":
            differences = [*self._differences, *(f"data: {name}" for name in data_changes)]
            line = resume_line(self.stored("numeric"), self.numeric, differences)
            logger.info(f"Resume: {line}", extra=on_screen())

    def _compare(self, start: Start) -> list[str]:
        """Return the accepted differences between the settings of a start and of this run."""
        excluded = self._settings["checkpoint.exclude_from_loading"]
        differences = [f"{part} not loaded" for part in excluded]
        stored = start.manifest or {}
        if start.kind == "resume" and start.format == "dcp":
            check_data_choice(start, self._settings["training.skip_steps"], excluded)
            differences.append("the checkpoint is TorchTitan's")
        if start.kind != "resume" or "config" not in stored:
            return differences
        resolved = {"global_batch_size": self._global_batch_size}
        changes = diff_settings(stored["config"], self._settings, stored, resolved)
        if note := check_changes(changes):
            logger.info(note)
        if reordered := changes.reordered():
            logger.warning(
                "The order of the samples differs from the run that saved the checkpoint: "
                f"{'; '.join(reordered)}"
            )
        return differences + changes.accepted()
