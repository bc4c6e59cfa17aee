"""The schema as text: `titan help`, `titan train --help` and docs/reference/config.md.

Run `python -m torchtitan_like.config.document > docs/reference/config.md` after a change.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from torchtitan_like.config.aliases import MOVED_SECTIONS, RENAMED, RENAMED_CONVERTERS
from torchtitan_like.config.base import Need, Section
from torchtitan_like.config.fields import Path, Setting, all_settings, settings_of
from torchtitan_like.config.schema import job_config
from torchtitan_like.config.toml_text import toml_value

_SYNTAX = """\
A TOML file contains settings ([section], key = value). It may extend another file (extends =
"base.toml"). The command line overrides both:
  --section.key value      or --section.key=value; - and _ in names are the same
  --section.switch         sets it to true; --section.no_switch to false; --section.switch=false too
  --section.list a,b       a list; its items are separated by commas
  --section.lists a,b c,d  a list of lists
  --section.key None       unsets a setting that may be unset
  --model.args.dim 256     a table with names of your own, such as --data.sources.NAME.path FILE
"""
# The settings that users change most, in the order of `titan train --help`.
COMMON = (
    *("job.dump_folder", "model.name", "model.flavor", "model.hf_assets_path"),
    *("training.dataset", "training.dataset_path", "training.steps", "training.seq_len"),
    *("training.local_batch_size", "training.global_batch_size"),
    *("optimizer.name", "optimizer.lr", "lr_scheduler.warmup_steps"),
    *("checkpoint.enable", "checkpoint.interval", "checkpoint.initial_load_path"),
    *("parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree"),
    *("activation_checkpoint.mode", "compile.enable"),
)
COLUMNS = 100

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m torchtitan_like.config.document > docs/reference/config.md`; a test compares the two. -->

One TOML file describes a run. Check it before you start the run:

```
titan check llama3_8b.toml --world-size 64
```

The command prints the resolved configuration (exit code 0) or all problems at once (exit code 78). With `--training` it is
as strict as training: missing files, too few micro-batches for a pipeline schedule, and requests for features that are not
available yet are errors instead of warnings.

## Precedence

A setting has the value of the first of these that contains it:

1. the command line: `--section.key value`
2. the TOML file
3. the file that it extends: `extends = "base.toml"`, relative to the TOML file, or the name of a file in the package
4. the default below

Names and defaults equal TorchTitan v0.2.2 where it has the setting.

## How to read the tables

- **Paths**: `~` is the home folder.
- **Unset**: TOML has no null. Write `"None"` where None is allowed.
- **Needs**: unless this condition holds, the setting has no effect. That is never an error. One warning lists the settings
  without effect that were written on top of the file that disables their feature.
- **Fixed on resume**: the setting affects the result, and a resumed run with another value is refused. To accept the change,
  add the key to `checkpoint.allow_change`, or do not load the state in parentheses (`checkpoint.exclude_from_loading`).
  Changes of datasets and samples have a check of their own; see `data.allow_change`.
- **Not available yet**: the setting is accepted, so that files of TorchTitan load. Training refuses it.

Each rank reads the file and its arguments by itself. All ranks end with exit code 78 if their settings differ. Only paths,
`job.config_file` and `job.description` may differ from node to node.
"""


def _sections(
    section: type[Section] | None = None, path: Path = ()
) -> Iterator[tuple[Path, type[Section]]]:
    """Yield every table of the schema that contains settings, with its path."""
    for setting in settings_of(section or job_config(), path):
        inner = setting.section
        if inner is None:
            continue
        inner_path = (*setting.path, "<name>") if setting.is_named_tables else setting.path
        if any(inner_setting.section is None for inner_setting in settings_of(inner)):
            yield inner_path, inner
        yield from _sections(inner, inner_path)


def _settings(section: type[Section], path: Path) -> list[Setting]:
    """Return the settings of a section, without sub-tables."""
    return [setting for setting in settings_of(section, path) if setting.section is None]


def _default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    value: Any = setting.default
    if value is None:
        return "unset"
    return "empty" if value == {} else toml_value(value)


def _conditions(needs: tuple[Need, ...]) -> str:
    """Return the conditions of needs as a sentence, with short keys inside their section, or ""."""
    conditions = dict.fromkeys(need.condition.replace("{key}", need.key) for need in needs)
    return f"Needs {'; '.join(conditions)}." if conditions else ""


def _meaning(setting: Setting) -> str:
    """Return the description of a setting and its own facts."""
    sentences = [setting.description, _conditions(setting.facts.needs)]
    if setting.affects not in ("nothing", "future_samples"):
        sentences.append(f"Fixed on resume ({setting.affects}).")
    return " ".join(filter(None, sentences))


def common_help() -> str:
    """Return the settings that users change most, and the syntax of settings."""
    all_of_them = {setting.key: setting for setting in all_settings()}
    lines = ["settings that are changed most:"]
    for key in COMMON:
        summary = re.split(r"\. (?=[A-Z])", all_of_them[key].description)[0].rstrip(".")
        lines += _entry(key, f"{summary}.")
    lines += ["", "`titan help SECTION` and `titan help KEY` explain all settings.", "", _SYNTAX]
    return "\n".join(lines).rstrip()


def settings_help(name: str) -> str:
    """Return the settings of a section, or the settings with that key or last part of the key.

    The text contains the type, the choices, the default and the meaning. "" if there are none.
    """
    name = name.removeprefix("--").replace("-", "_")
    is_section = any(".".join(path) == name for path, _ in _sections())
    lines: list[str] = []
    for path, section in _sections():
        settings = [
            setting
            for setting in _settings(section, path)
            if f"{setting.key}.".startswith(f"{name}.")
            or (not is_section and f".{setting.key}".endswith(f".{name}"))
        ]
        if not settings:
            continue
        title = (section.__doc__ or "").splitlines()[0]
        heading = f"[{'.'.join(path)}]  {title} {_conditions(section.facts.needs)}".rstrip()
        lines += [*textwrap.wrap(heading, width=COLUMNS, subsequent_indent="  "), ""]
        for setting in settings:
            key = f"{setting.key}.<name>" if setting.is_free else setting.key
            facts = f"{setting.expected}; default: {_default(setting)}."
            lines += _entry(key, f"{_meaning(setting)} Value: {facts}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _entry(key: str, text: str) -> list[str]:
    """Return the lines of a setting: its flag and the text."""
    return textwrap.wrap(f"  --{key}  {text}", COLUMNS, subsequent_indent=" " * 8)


def markdown() -> str:
    """Return the text of docs/reference/config.md."""
    parts = [_INTRODUCTION]
    for path, section in _sections():
        title = f"{section.__doc__} {_conditions(section.facts.needs)}".rstrip()
        parts.append(f"## [{'.'.join(path)}]\n\n{title}\n")
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        parts += [_row(setting) for setting in _settings(section, path)]
        parts.append("")
    parts.append("## Older names\n\nThese names are accepted with a warning:\n")
    moved = {**RENAMED, **{(*old, "*"): (*new, "*") for old, new in MOVED_SECTIONS.items()}}
    parts += [f"- `{'.'.join(old)}` is `{'.'.join(new)}`" for old, new in moved.items()]
    parts += [f'- the converter `"{old}"` is `"{new}"`' for old, new in RENAMED_CONVERTERS.items()]
    parts.append("- keys of `[parallelism]` in `[training]` or `[experimental]`\n")
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    """Return the row of a setting in its section's table."""
    name = f"`{setting.path[-1]}`"
    cells = (name, setting.expected, f"`{_default(setting)}`", _meaning(setting))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
