"""Write the files of a Kubernetes job into a folder, for a user to edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.util.templates import copy_templates, list_templates

TEMPLATES = Path(__file__).with_name("templates")
# Pods are named JOB-INDEX-xxxxx, and their host names JOB-INDEX have at most 63 characters.
MAX_NAME = 50


class JobFacts(NamedTuple):
    """What differs between jobs.

    name: of the job, its service and its run folder. nodes: pods, each with all GPUs of a node.
    gpus: of each node. image: a container image with this package. config: as for `titan train`.
    """

    name: str
    nodes: int
    gpus: int
    image: str
    config: str


def write_job(folder: Path, facts: JobFacts) -> list[Path]:
    """Write job.yaml, volume.yaml and sky.yaml into `folder`. Returns the new files.

    Raises ValueError for a malformed name, FileExistsError, before it writes anything, if one of
    the files exists, and OSError.
    """
    if len(facts.name) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", facts.name):
        raise ValueError(
            f"The name is {facts.name!r}. Expected at most {MAX_NAME} lower-case letters, digits "
            "and hyphens, with a letter first and no hyphen last. Correct --name."
        )
    words = {f"@{field.upper()}@": str(value) for field, value in facts._asdict().items()}
    return copy_templates(list_templates(TEMPLATES), folder, words)
