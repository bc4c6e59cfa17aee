"""Copy files into a folder, for a user to edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def list_templates(folder: Path) -> list[Path]:
    """Return the files to copy: all but `__init__.py`."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"
    )


def copy_templates(templates: Sequence[Path], folder: Path, words: Mapping[str, str]) -> list[Path]:
    """Copy text files into `folder` and replace each word of `words`. Returns the new files.

    Raises FileExistsError, before it writes anything, if one of them exists, and OSError.
    """
    targets = {template: folder / template.name for template in templates}
    existing = sorted(str(target) for target in targets.values() if target.exists())
    if existing:
        raise FileExistsError(
            f"{folder} already contains {', '.join(Path(name).name for name in existing)}. "
            "Expected a folder without these files. Choose another one, or move them."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for template, target in targets.items():
        text = template.read_text(encoding="utf-8")
        for word, replacement in words.items():
            text = text.replace(word, replacement)
        target.write_text(text, encoding="utf-8")
        if text.startswith("#!"):  # a wheel may have lost the mode
            target.chmod(target.stat().st_mode | 0o111)
    return list(targets.values())
