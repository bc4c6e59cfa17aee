"""The schema as text: ``--help`` and docs/reference/config.md (``python -m torchtitan_like.config.document``)."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from torchtitan_like.config.aliases import MOVED_SECTIONS, RENAMED, RENAMED_CONVERTERS
from torchtitan_like.config.base import Section
from torchtitan_like.config.fields import Path, Setting, settings_of
from torchtitan_like.config.schema import JobConfig
from torchtitan_like.config.toml_text import toml_value

_USAGE = """\
usage: python -m torchtitan_like.train --job.config_file X.toml [--section.key value ...]

Settings come from a TOML file ([section], key = value), which may start from another one (extends = "base.toml"); the
command line overrides them.
  --section.key value     or --section.key=value; - and _ in names mean the same
  --section.switch        sets it to true; --section.no_switch to false; --section.switch=false works too
  --section.list a,b      items separated by commas; a list of lists is written a,b c,d
  --section.key None      unsets what may be unset
  --model.args.dim 256    tables with names of your own: --data.sources.NAME.path FILE
Check without training:   titan check X.toml [--section.key value ...] [--world-size N]
"""

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m torchtitan_like.config.document > docs/reference/config.md`; a test compares the two. -->

A run is described by one TOML file. The line `extends = "base.toml"` makes it start from another one, next to it or in the
package. `--section.key value` on the command line overrides the file, the file overrides the one it extends, and that
overrides the defaults below. Names and defaults are those of TorchTitan v0.2.2 where it has the setting.

Values are checked for type, choice and range before anything starts, and all problems are reported together:

```
titan check llama3_8b.toml --world-size 64
```

prints the resolved configuration (exit code 0) or the problems (exit code 78). With `--training` it checks as training
does: files must exist, and settings whose feature is not available yet are errors instead of warnings.

A setting of a feature that is off is never refused. One warning lists the settings without effect that were written on
top of the file that switches the feature off.

Each rank reads the file and its arguments by itself. They compare what they have read: all end with 78 where nodes were started
with other settings. Only where things lie (paths, folders) may differ from node to node.

In a path `~` is the home folder. TOML has no null; where None is allowed, the word `"None"` stands for it.
"""


def _sections(section: type[Section] = JobConfig, path: Path = ()) -> Iterator[tuple[Path, type[Section]]]:
    """Every table of the schema that holds settings, with its path."""
    for setting in settings_of(section, path):
        inner = setting.section
        if inner is None:
            continue
        inner_path = (*setting.path, "<name>") if setting.is_named_tables else setting.path
        if any(one.section is None for one in settings_of(inner)):
            yield inner_path, inner
        yield from _sections(inner, inner_path)


def _plain(section: type[Section], path: Path) -> list[Setting]:
    return [setting for setting in settings_of(section, path) if setting.section is None]


def _default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    value: Any = setting.default
    if value is None:
        return "unset"
    return "empty" if value == {} else toml_value(value)


def help_text() -> str:
    """All settings, grouped by section, with type, choices, default and meaning."""
    lines = [_USAGE]
    for path, section in _sections():
        lines.append(f"[{'.'.join(path)}]  {(section.__doc__ or '').splitlines()[0]}")
        for setting in _plain(section, path):
            key = f"{setting.key}.<name>" if setting.is_free else setting.key
            about = f"{setting.expected}; default: {_default(setting)}. {setting.field.description}"
            lines.append(f"  --{key}")
            lines += textwrap.wrap(about, width=112, initial_indent=" " * 8, subsequent_indent=" " * 8)
        lines.append("")
    return "\n".join(lines)


def markdown() -> str:
    """The text of docs/reference/config.md."""
    parts = [_INTRODUCTION]
    for path, section in _sections():
        parts.append(f"## [{'.'.join(path)}]\n\n{section.__doc__}\n")
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        parts += [_row(setting) for setting in _plain(section, path)]
        parts.append("")
    parts.append("## Older names\n\nAccepted, with a notice:\n")
    moved = {**RENAMED, **{(*old, "*"): (*new, "*") for old, new in MOVED_SECTIONS.items()}}
    parts += [f"- `{'.'.join(old)}` is `{'.'.join(new)}`" for old, new in moved.items()]
    parts += [f'- the converter `"{old}"` is `"{new}"`' for old, new in RENAMED_CONVERTERS.items()]
    parts.append("- keys of `[parallelism]` written under `[training]` or `[experimental]`\n")
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    cells = (f"`{setting.path[-1]}`", setting.expected, f"`{_default(setting)}`", setting.field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
