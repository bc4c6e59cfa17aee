"""Find the files of a path, and their format."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.formats import EXPANSION

ENDINGS: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".text"),
    "jsonl": tuple(
        name + ending for ending in ("", *EXPANSION) for name in (".jsonl", ".json", ".ndjson")
    ),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
# Next to a user's data the token cache is a hidden folder, which globs and other readers skip. The
# one in a run's folder is visible. Neither is read as data.
CACHE_FOLDER_NAME = ".token_cache"
VISIBLE_CACHE_FOLDER_NAME = "token_cache"
CACHE_FOLDER_NAMES = (CACHE_FOLDER_NAME, VISIBLE_CACHE_FOLDER_NAME)
_DATASET_MARKS = ("dataset_info.json", "state.json")


def find_files(path_text: str, format_name: str) -> list[str]:
    """Return the sorted absolute paths of a file, a glob, or a folder with its sub-folders.

    format_name: a key of `ENDINGS`, or "auto". Raises DataError if there are no files.
    """
    path = Path(path_text).expanduser()
    if path.is_file():
        files = [str(path.absolute())]
    elif path.is_dir():
        files = _files_below(path.absolute(), format_name)
    else:
        matches = set(matching(path))
        folders = {match.parent for match in matches}
        matching_files = sorted(file for folder in folders for file in _files_in(folder, matches))
        files = [str(file.absolute()) for file in matching_files]
    if not path.is_file():
        files = _without_unlisted(files)
    if not files:
        reason = "not a file, folder or matching glob"
        if path.is_dir():
            reason = "a folder without files of a known ending"
        if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path_text):
            raise DataError(
                f"data at {scheme[0]} cannot be read: {path_text}. Expected local files, or "
                "hf://datasets/...: copy the files to a disk of this machine, and give their folder"
            )
        raise DataError(
            f"no data at {path_text!r}: it is {reason}. Expected files of text: check the path "
            f"(relative paths start at {os.getcwd()}; {_known_endings()})"
        )
    return files


def _files_in(folder: Path, paths: set[Path]) -> Iterator[Path]:
    """Yield the ``paths`` that are files of ``folder``. One scan is faster than a stat per file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if (path := folder / entry.name) in paths:
                if entry.is_symlink() and not path.exists():
                    raise _broken_link(path)
                if entry.is_file():
                    yield path


def matching(pattern: Path) -> list[Path]:
    """Return the matches of a glob, without token caches unless the glob names one."""
    matches = map(Path, glob.glob(str(pattern), recursive=True))
    names = set(CACHE_FOLDER_NAMES)
    return [path for path in matches if names & {*pattern.parts} or not names & {*path.parts}]


def _without_unlisted(files: list[str]) -> list[str]:
    """Remove the files that a dataset saved by `datasets` does not list.

    They contain rows of an earlier dataset, or the same rows again: `map` keeps its cache there.
    """
    folders = {os.path.dirname(file) for file in files if _is_arrow(file)}
    names = {folder: _listed_names(Path(folder)) for folder in folders}

    def is_listed(file: str) -> bool:
        folder, name = os.path.split(file)
        listed_names = names[folder]
        return listed_names is None or name in listed_names

    return [file for file in files if not _is_arrow(file) or is_listed(file)]


def _is_arrow(file: str) -> bool:
    return file.endswith(".arrow")


def _listed_names(folder: Path) -> list[str] | None:
    """Return the file names that a saved dataset lists; None without a dataset or a valid list."""
    if not all((folder / mark).exists() for mark in _DATASET_MARKS):
        return None
    try:
        state = json.loads((folder / _DATASET_MARKS[1]).read_text(encoding="utf-8"))
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError, ValueError):
        return None
    if missing := [name for name in names if not (folder / name).exists()]:
        raise DataError(
            f"{folder} lacks {missing[0]}, which its {_DATASET_MARKS[1]} lists. Expected all "
            "files: save or copy the dataset again"
        )
    return names


def _files_below(folder: Path, format_name: str) -> list[str]:
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").exists())
        raise DataError(
            f"{folder} contains several splits ({', '.join(splits)}). Expected one: give its path, "
            f"such as {folder / splits[0]}"
        )
    if format_name == "auto" and all((folder / mark).exists() for mark in _DATASET_MARKS):
        format_name = "arrow"
    names = ENDINGS.values() if format_name == "auto" else [ENDINGS[format_name]]
    return files_below(folder, tuple(ending for group in names for ending in group))


def files_below(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """Return the files with these endings in ``folder`` and its sub-folders, sorted by path parts.

    Hidden files and token caches are skipped. Links are followed, as in globs, but no folder is
    read twice.
    """
    files: list[str] = []
    real_paths = set()
    remaining = [os.fspath(folder)]
    while remaining:
        parent = remaining.pop()
        if (real_path := os.path.realpath(parent)) in real_paths:
            continue
        real_paths.add(real_path)
        folders = []
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:  # one scan is faster than a stat per file
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders += [entry.path] if entry.name not in CACHE_FOLDER_NAMES else []
                elif entry.name.endswith(endings):
                    if entry.is_symlink() and not os.path.exists(entry.path):
                        raise _broken_link(entry.path)
                    files.append(entry.path)
        remaining += sorted(folders, reverse=True)
    # NUL sorts before every character of a name: the files of a folder come before "folder-2".
    return sorted(files, key=lambda file: file.replace("/", "\0"))


def _broken_link(file: str | Path) -> DataError:
    return DataError(
        f"{file} is a broken link. Expected a link to a file: copy the file again, or remove the "
        "link"
    )


def _known_endings() -> str:
    endings = "; ".join(f"{name}: {' '.join(endings)}" for name, endings in ENDINGS.items())
    return f'known endings: {endings}; files of token ids need format = "tokens"'


def format_of(files: list[str]) -> str:
    """Return the format of files by their endings. Raises DataError unless it is one known format."""
    examples: dict[str, str] = {}
    for file in files:
        name = next((name for name, endings in ENDINGS.items() if file.endswith(endings)), None)
        if name is None:
            raise DataError(
                f"unknown format of {file}. Expected a known ending: set the source's `format` "
                f"({_known_endings()})"
            )
        examples.setdefault(name, file)
    if len(examples) > 1:
        listed = ", ".join(f"{name} ({file})" for name, file in examples.items())
        raise DataError(
            f"files of several formats in one source: {listed}. Expected one format: set the "
            "source's `format`, or give a narrower path"
        )
    return next(iter(examples))
