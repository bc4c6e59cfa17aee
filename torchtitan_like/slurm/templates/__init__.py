"""The batch scripts, and the function that copies them for a user to edit.

Python files in this folder import the standard library only.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

TEMPLATES = Path(__file__).parent
# Words of the templates that are replaced by paths. Slurm copies a batch script before it runs,
# so a script cannot find its own folder.
FOLDER_OF_SCRIPTS = "/folder/of/these/scripts"
FOLDER_OF_TITAN = "/folder/of/titan"
PYTHON_OF_TITAN = "/python/of/titan"


def write_scripts(folder: Path) -> list[Path]:
    """Copy all batch scripts and their helpers into `folder`. Returns the new files.

    Raises FileExistsError, before it writes anything, if one of them exists, and OSError.
    """
    templates = sorted(path for path in TEMPLATES.iterdir() if path.is_file())
    targets = {path: folder / path.name for path in templates if path.name != "__init__.py"}
    if existing := [target.name for target in targets.values() if target.exists()]:
        raise FileExistsError(
            f"{folder} already contains {', '.join(existing)}. "
            "Expected a folder without these files. Choose another one, or move them."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for template, target in targets.items():
        text = template.read_text(encoding="utf-8")
        text = text.replace(FOLDER_OF_SCRIPTS, shlex.quote(str(folder.absolute())))
        text = text.replace(FOLDER_OF_TITAN, shlex.quote(str(Path(sys.executable).parent)))
        text = text.replace(PYTHON_OF_TITAN, shlex.quote(sys.executable))
        target.write_text(text, encoding="utf-8")
        if text.startswith("#!"):  # a wheel may have lost the mode
            target.chmod(target.stat().st_mode | 0o111)
    return list(targets.values())
