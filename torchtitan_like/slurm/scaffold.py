"""Copy the batch scripts into a folder, for a user to edit."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from torchtitan_like.util.templates import copy_templates, list_templates

TEMPLATES = Path(__file__).with_name("templates")
# Words of the templates that are replaced by paths. Slurm copies a batch script before it runs,
# so a script cannot find its own folder.
FOLDER_OF_SCRIPTS = "/folder/of/these/scripts"
FOLDER_OF_TITAN = "/folder/of/titan"


def write_scripts(folder: Path) -> list[Path]:
    """Copy all batch scripts and their helpers into `folder`. Returns the new files.

    Raises FileExistsError, before it writes anything, if one of them exists, and OSError.
    """
    words = {
        FOLDER_OF_SCRIPTS: shlex.quote(str(folder.absolute())),
        FOLDER_OF_TITAN: shlex.quote(str(Path(sys.executable).parent)),
    }
    return copy_templates(list_templates(TEMPLATES), folder, words)
