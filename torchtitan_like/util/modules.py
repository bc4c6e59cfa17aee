"""Import code by name: of the user, of the tools, which the core never imports, and of torchao."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# Loggers that warn during an import of torchao, of its libraries for other hardware and of its
# constants.
_TORCHAO_LOGGERS = ("torchao", "torch.utils._pytree")


def pip_install(*packages: str) -> str:
    """Return the command that installs packages where this program runs, in a venv or not."""
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(map(shlex.quote, packages))}"


def is_file_name(name: str) -> bool:
    """Return True if `name` is the path of a Python file, False if it is the name of a module."""
    return name.endswith(".py")


def is_dotted(name: str) -> bool:
    """Return True if a setting names user code, as "module:name"."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name) is not None


def package_of(name: str) -> str:
    """Return the outermost package or module of `package.module` or `package.module:name`."""
    return name.partition(":")[0].partition(".")[0]


def load_tool(name: str) -> Any:
    """Return the function "module:name" of a tool that takes part in a run.

    The core calls it by name, so that a reader of the core needs to know no tool.
    """
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def import_named(name: str) -> ModuleType:
    """Import a module by its name, or a Python file by its path.

    A second call returns the same module. Raises the errors of the import.
    """
    if not is_file_name(name):
        return importlib.import_module(name)
    path = Path(name).expanduser().resolve()
    key = f"file:{path}"  # cannot collide with the name of a module
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # for any path that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def describe_line(error: BaseException) -> str:
    """Return `, at line <n> of <file>` for the line that raised the error, or "" if it is unknown.

    A syntax error names its own line. Lines of this package and of Python's importer do not count.
    """
    if isinstance(error, SyntaxError):
        return ""
    package = str(Path(__file__).resolve().parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package, "<frozen"))
        and not frame.filename.startswith(sys.base_prefix)
    ]
    return f", at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


@contextmanager
def searching_modules_in(folder: Path) -> Iterator[None]:
    """Search `folder` first for modules in the block, as `python -m` does for the current folder.

    The block includes calls of the module's functions, which may import other modules. This is the
    only change of the search path in this package: the user names a module in that folder.
    """
    entry = str(folder)
    sys.path[:0] = [entry]
    try:
        yield
    finally:
        if entry in sys.path:  # user code may remove it
            sys.path.remove(entry)


@contextmanager
def silencing_torchao() -> Iterator[None]:
    """Silence warnings about an import of torchao that a user can do nothing about."""
    loggers = [logging.getLogger(name) for name in _TORCHAO_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
