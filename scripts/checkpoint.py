"""Look at checkpoints, verify, compare, convert and move them.

    python scripts/checkpoint.py ls outputs/checkpoint
    python scripts/checkpoint.py show outputs/checkpoint/step-500
    python scripts/checkpoint.py verify outputs/checkpoint
    python scripts/checkpoint.py diff outputs/checkpoint/step-500 outputs/checkpoint/step-1000
    python scripts/checkpoint.py convert outputs/checkpoint/step-500 out.pt --to pt --dtype bfloat16
    python scripts/checkpoint.py offload outputs/checkpoint /archive/run-7 --keep 2 --command "rsync -a {src} {dst}"
    python scripts/checkpoint.py interval --run outputs --mtbf-hours 12

One process, no GPU. Exit codes: 0 all is well, 1 damage or a difference was found, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from scripts.named_in_config import add_import_flag, import_custom, with_assets
from scripts.watch import rows_of
from torchtitan_like.checkpoint.changes import diff_settings
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.extents import find_damage
from torchtitan_like.checkpoint.lock import FileLock
from torchtitan_like.checkpoint.publishing import STAGED, StagedOutput
from torchtitan_like.checkpoint.retention import PIN, find_expired
from torchtitan_like.checkpoint.start import FORMAT_NAMES, format_of
from torchtitan_like.checkpoint.step_folders import (
    HF_EXPORTS,
    MANIFEST,
    NONFINITE,
    Manifest,
    StepFolder,
    all_steps,
    file_records,
    numbered_folders,
    published_steps,
    read_manifest,
)
from torchtitan_like.config import ConfigError, dump_toml, load_config, load_stored_config
from torchtitan_like.config.layers import parse_toml
from torchtitan_like.util.files import sync_path, write_atomically

if TYPE_CHECKING:
    from scripts.checkpoint_contents import Contents
    from torchtitan_like.checkpoint.loading import Identity

FORMATS = ("native", "hf", "dcp", "pt")
DTYPES = ("bfloat16", "float16", "float32")
LEFTOVERS = (
    (".tmp-", "unfinished"),
    (STAGED, "unfinished"),
    (".superseded-", "superseded"),
    (NONFINITE, "non-finite"),
    (".trash-", "being deleted"),
)


# ---- ls, verify


def ls(arguments: argparse.Namespace) -> int:
    """What stands in the folder of a run's checkpoints, and in its exports."""
    folder: Path = arguments.folder
    rows = [row for place in (folder, folder / HF_EXPORTS) if place.is_dir() for row in _rows(place, folder)]
    if not rows:
        raise CheckpointError(f"{folder} holds no step-N: give the folder of a run's checkpoints")
    for name, kind, size, age, notes in rows:
        print(f"{name:<28} {kind:<12} {size:>10} {age:>12}  {notes}".rstrip())
    return 0


def _rows(place: Path, folder: Path) -> Iterator[tuple[str, str, str, str, str]]:
    steps = {step.path: step for step in all_steps(place)}
    for path in sorted(filter(Path.is_dir, place.iterdir()), key=_number):
        try:
            files = [file.stat() for file in path.rglob("*") if file.is_file()]
            newest = max((file.st_mtime for file in files), default=path.stat().st_mtime)
        except FileNotFoundError:  # a run has renamed or deleted it meanwhile
            continue
        step, notes = steps.get(path), []
        if step is not None:
            kind = step.manifest.get("kind", "?") if step.damage is None else "DAMAGED"
            notes = [step.damage] if step.damage else []
        elif leftover := next((words for mark, words in LEFTOVERS if mark in path.name), None):
            kind = leftover
        elif path in dict(numbered_folders(place)).values():
            found = format_of(path)
            kind = "foreign" if found else "torn"
            notes = [FORMAT_NAMES[found] if found else f"no {MANIFEST}, never read"]
        else:
            continue
        notes += ["pinned"] if (path / PIN).exists() else []
        name = path.relative_to(folder).as_posix()
        age = f"{in_time(time.time() - newest)} ago"
        yield name, kind, in_bytes(sum(file.st_size for file in files)), age, ", ".join(notes)


def _number(path: Path) -> tuple[int, str]:
    found = re.search(r"\d+", path.name)
    return int(found[0]) if found else 0, path.name


def verify(arguments: argparse.Namespace) -> int:
    """Read every extent of one step, or of every step of a folder."""
    path: Path = arguments.path
    manifest = read_manifest(path)
    steps = [*all_steps(path), *all_steps(path / HF_EXPORTS)]
    if manifest is not None:
        steps = [StepFolder(manifest["step"], path, manifest)]
    if not steps:
        raise CheckpointError(f"{path} is neither a step with a {MANIFEST} nor a folder that holds such steps")
    return max([_verify(step) for step in steps])


def _verify(step: StepFolder) -> int:
    """Print the damage of a step; returns 1 when there is any."""
    try:
        return _verify_files(step)
    except FileNotFoundError:
        if step.path.exists():
            raise
        print(f"{step.path}: not verified, a run has deleted or renamed it meanwhile")
        return 0


def _verify_files(step: StepFolder) -> int:
    records = file_records(step.manifest)
    # The sizes are among what find_damage reports; a manifest that cannot be read leaves nothing to report but itself.
    damage = [str(e) for e in find_damage(step.path, records, progress=Meter(step.path.name))]
    damage = damage or ([step.damage] if step.damage else [])
    if damage and not step.path.exists():
        raise FileNotFoundError(step.path)
    for text in damage:
        print(text)
    known = {*records, MANIFEST, PIN}
    names = {file.relative_to(step.path).as_posix() for file in step.path.rglob("*") if file.is_file()}
    if records and (extra := sorted(names - known)):
        print(f"{step.path}: no part of the checkpoint, and not verified: {', '.join(extra)}")
    if not damage:
        size = in_bytes(sum(record.size for record in records.values()))
        print(
            f"{step.path}: {f'whole, {size} verified' if records else 'format 1, without hashes: cannot be verified'}"
        )
    return int(bool(damage))


class Meter:
    """Progress on the terminal: share, rate, time left."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.clock = what, clock
        self.begin = self.shown = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self.clock()
        if now - self.shown < 1 and done < total:
            return
        self.shown = now
        rate = done / max(now - self.begin, 1e-9)
        left = in_time((total - done) / rate)
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(f"{self.what}: {done / total:4.0%} of {in_bytes(total)}, {in_bytes(rate)}/s, {left} left  ",
              end=end, file=sys.stderr, flush=True)  # fmt: skip


# ---- show, diff, convert


def show(arguments: argparse.Namespace) -> int:
    """The manifest in short, and every tensor."""
    from scripts import checkpoint_contents

    contents = checkpoint_contents.open_contents(arguments.step)
    files = file_records(contents.manifest)
    manifest = {k: v for k, v in contents.manifest.items() if k not in ("files", "config", "extent_bytes", "hash")}
    for key, value in manifest.items():
        print(f"{key}: {json.dumps(value) if isinstance(value, (dict, list)) else value}")
    for name, record in files.items():
        print(f"file {name}: {record.size:,} bytes")
    for name, (shape, dtype) in contents.forms.items():
        print(f"{name}  {checkpoint_contents.short(dtype)}  {list(shape)}")
    for name in contents.objects:
        print(f"{name}  (no tensor)")
    count = sum(math.prod(shape) for shape, _ in contents.forms.values())
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in contents.forms.values())
    print(f"{len(contents.forms)} tensors, {count:,} elements, {in_bytes(size)}")
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """What differs between two checkpoints: settings, names, shapes, types, numbers, and what is no tensor."""
    from scripts import checkpoint_contents

    pair = [checkpoint_contents.open_contents(arguments.a), checkpoint_contents.open_contents(arguments.b)]
    lines = _differing_settings(*pair)
    held: list[Any] = [{**contents.forms, **dict.fromkeys(contents.objects)} for contents in pair]
    reads: list[Callable[[str], Any]] = [contents.read for contents in pair]
    if pair[0].family != pair[1].family:  # both under our names
        native = next((c for c in pair if c.kind == "native"), pair[0])
        identity, _ = _identify(native, arguments.config, arguments.custom_import)
        held = [checkpoint_contents.our_weights(contents, identity) for contents in pair]
        reads = [weights.__getitem__ for weights in held]
    for here, there in ((0, 1), (1, 0)):
        lines += [f"{name}: only in {pair[here].path}" for name in held[here] if name not in held[there]]
    objects = {name for contents in pair for name in contents.objects}
    common = [name for name in held[0] if name in held[1]]
    found = {
        name: checkpoint_contents.difference(reads[0](name), reads[1](name)) for name in common if name not in objects
    }
    others = {
        name: checkpoint_contents.object_difference(reads[0](name), reads[1](name))
        for name in common
        if name in objects
    }
    lines += [f"{name}: {text}" for name, text in (found | others).items() if text]
    equal = sum(text is None for text in found.values())
    print("\n".join([*lines, f"{equal} of {len(found)} common tensors are equal bit for bit"]))
    return int(bool(lines))


def _differing_settings(a: Contents, b: Contents) -> list[str]:
    before, after = a.manifest.get("config"), b.manifest.get("config")
    if not before or not after:
        return []
    try:
        changes = diff_settings(before, parse_toml(after), {}, {})
    except ValueError as error:
        raise CheckpointError(f"{b.path}: the configuration in its manifest is no TOML: {error}") from error
    return sorted(str(change) for group in changes for change in group)


def convert(arguments: argparse.Namespace) -> int:
    """From any format to another, with all names translated where the two have names of their own."""
    import torch

    from scripts import checkpoint_contents

    source = checkpoint_contents.open_contents(arguments.src, trust_pickle=arguments.trust_pickle)
    if arguments.trust_pickle and source.family != checkpoint_contents.FAMILIES[arguments.to]:
        raise CheckpointError(
            f"--trust-pickle with --to {arguments.to}: {arguments.src} is in the format {source.kind}. First "
            f"make a copy in its own format: --to {source.kind} --trust-pickle. Then convert the copy"
        )
    identity, config = None, source.manifest.get("config")
    if source.family != checkpoint_contents.FAMILIES[arguments.to] or (arguments.to == "native" and config is None):
        identity, text = _identify(source, arguments.config, arguments.custom_import)
        config = config or text
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    left_out = checkpoint_contents.convert(
        source, arguments.dst, arguments.to, dtype=dtype, identity=identity, config=config
    )
    for name in left_out:
        print(f"{name} is left out: it is neither a tensor nor a plain Python value")
    print(f"{arguments.dst} is complete")
    return 0


def _identify(source: Contents, config_file: Path | None, module: str) -> tuple[Identity, str]:
    """The model whose tables translate, and its configuration: that of --config, else of the step itself."""
    from torchtitan_like.launch import identify

    path = config_file or source.path / "config.toml"
    if not path.is_file():
        raise CheckpointError(
            f"{source.path} does not say which model it holds, and its tensors need other names: give --config, the TOML "
            "file of a run with this model"
        )
    config = load_config(["--job.config_file", str(path)]) if config_file else load_stored_config(path)
    import_custom(config, module)
    return identify(with_assets(config.model, path.parent)), dump_toml(config)


# ---- offload


def offload(arguments: argparse.Namespace) -> int:
    """Copy every complete step, verify the copy, and then let go of those that are not among the newest here.

    A step is taken for copied when `step-N.sha256` stands beside it at the destination: `sha256sum -c` reads it. Before
    it is removed here, both are compared once more: the run may have gone back and written another one of that number,
    while others were copied too, which takes hours.
    """
    folder = arguments.folder
    if not published_steps(folder):
        raise CheckpointError(f"{folder} holds no complete step")
    if arguments.dry_run:
        return _offload(arguments)
    remedy = "Wait until it ends: two offloads must not remove steps of one run together"
    subject = f"the offload of {folder}"
    with FileLock(folder / "offload.lock", subject=subject, holder="process", remedy=remedy):
        return _offload(arguments)


def _offload(arguments: argparse.Namespace) -> int:
    folder, target = arguments.folder, arguments.dest
    is_local = "://" not in target
    steps = published_steps(folder)
    copied_before, damaged = set(), set()
    safe: dict[int, Manifest] = {}
    for step in steps:
        if is_local and _sums_file(target, step).exists():
            copied_before.add(step.step)
        elif arguments.dry_run:
            safe[step.step] = step.manifest
            print(f"{step.path} would be verified and copied to {target}")
        elif _verify(step):
            damaged.add(step.step)
        elif is_local:
            _archive(step, Path(target), arguments.command)
            safe[step.step] = step.manifest
            print(f"{step.path} is copied to {target} and verified there")
        else:
            _run_copy_command(step.path, target, arguments.command)
            print(f"{step.path} is copied to {target}, where it cannot be read back from here: it is kept")

    # A damaged step is none of the newest that stay: nothing could be resumed from it.
    kept = {step.step: step for step in published_steps(folder) if step.step not in damaged}
    folders = [(number, step.path) for number, step in kept.items()]
    expiry = find_expired(folders, lambda number, _: kept[number].is_full, arguments.keep)
    for old in (kept[number] for number, _ in expiry.steps):
        if arguments.dry_run:
            ending = "would be removed here, if its copy is right" if is_local else "would be kept"
            print(f"{old.path} {ending}")
            continue
        if old.step in copied_before:
            _check_copy(Path(target) / old.path.name, old, _sums(old.path, old.path.name))
        if old.step in copied_before or safe.get(old.step) == old.manifest:
            trash = folder / f".trash-{old.step}-offloaded"
            os.rename(old.path, trash)
            shutil.rmtree(trash)
            print(f"{old.path} is removed here")
    return int(bool(damaged))


def _archive(step: StepFolder, target: Path, command: str | None) -> None:
    """Copy one step into a folder of this machine, verify the copy, and write its checksums."""
    name = step.path.name
    with StagedOutput(target / name) as output:
        sums = _sums(step.path, name)
        if command is None and not output.final.exists():
            shutil.copytree(step.path, output.path)
            for file in output.path.rglob("*"):
                sync_path(file)
            _check_copy(output.path, step, sums)
            output.publish()
        else:  # without a command: the copy of an offload that ended before it wrote the checksums
            if command is not None:
                _run_copy_command(step.path, str(target), command)
            _check_copy(output.final, step, sums)
        write_atomically(_sums_file(target, step), sums, target / f"{name}.sha256.tmp")


def _sums_file(target: str | Path, step: StepFolder) -> Path:
    return Path(target) / f"{step.path.name}.sha256"


def _sums(path: Path, name: str) -> str:
    """A line `sha256  NAME/file` for every file of a step's folder or of its copy."""
    lines = []
    for file in sorted(file for file in path.rglob("*") if file.is_file() and file.name != PIN):
        digest, buffer = hashlib.sha256(), bytearray(2**20)
        with open(file, "rb", buffering=0) as content:
            while count := content.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        lines.append(f"{digest.hexdigest()}  {name}/{file.relative_to(path).as_posix()}\n")
    return "".join(lines)


def _run_copy_command(path: Path, target: str, command: str | None) -> None:
    """Run the user's copy command. Raises CheckpointError when there is none, or it fails."""
    if command is None:
        raise CheckpointError(
            f"{target} is no folder of this machine: give --command, with {{src}}, {{dst}} and {{name}}"
        )
    try:
        line = [part.format(src=path, dst=target, name=path.name) for part in shlex.split(command)]
    except (LookupError, ValueError) as error:
        raise CheckpointError(
            f"--command {command}: {error!r}; expected {{src}}, {{dst}} and {{name}}, other braces doubled"
        ) from error
    if code := subprocess.run(line).returncode:
        raise CheckpointError(f"{shlex.join(line)} ended with code {code}: nothing is removed")


def _check_copy(copied: Path, step: StepFolder, sums: str) -> None:
    name = step.path.name
    found = _sums(copied, name) if copied.is_dir() else ""
    if found != sums:
        differing = set(sums.splitlines()) ^ set(found.splitlines())
        names = sorted({line.split("  ", 1)[1] for line in differing})
        raise CheckpointError(
            f"{copied} is not what was copied: {', '.join(names)}. {step.path} is kept. To copy it again, move that one "
            f"and {name}.sha256 away"
        )


# ---- interval


def interval(arguments: argparse.Namespace) -> int:
    """What saving costs, and what a failure costs, for several intervals.

    The best interval, in seconds of training between two saves, is sqrt(2 C M) for a save of C seconds and a mean time
    between failures of M: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006. A failure loses half
    an interval on average. With --run the seconds are medians of that run's newest saves and steps; of a save that is made in
    the background it is the time from its beginning to its name, for which training does not stand still.
    """
    save, step, mtbf = arguments.save_seconds, arguments.step_seconds, 3600 * arguments.mtbf_hours
    if arguments.run:
        saves, steps = _times(arguments.run)
        save, step = save or statistics.median(saves), step or statistics.median(steps)
        print(
            f"{save:.3g} s a save, {step:.3g} s a step, by {len(saves):,} saves and {len(steps):,} steps of {arguments.run}"
        )
    if not (save and step):
        raise CheckpointError("how long does a save take, and a step? With --save-seconds and --step-seconds, or --run")
    best = math.sqrt(2 * save * mtbf)
    given = [arguments.interval] if arguments.interval else []
    print(f"{'steps':>8} {'between saves':>14} {'time saving':>12} {'lost per failure':>17} {'lost in all':>12}")
    for steps in sorted({*given, *(max(1, round(best / step * factor)) for factor in (0.25, 0.5, 1, 2, 4))}):
        between = steps * step
        saving = save / (between + save)
        lost = (between + save) / 2
        note = "  <- best (Young, Daly)" if steps == max(1, round(best / step)) else "  <- given" * (steps in given)
        print(f"{steps:>8,} {in_time(between):>14} {saving:>12.2%} {in_time(lost):>17} "
              f"{saving + lost / mtbf:>12.2%}{note}")  # fmt: skip
    return 0


def _times(run: Path) -> tuple[list[float], list[float]]:
    """Seconds of each full save, and of each step that follows the one before it."""
    saves = [
        row["seconds"] for row in rows_of(run / "events.jsonl") if row["event"] == "save" and row["form"] == "full"
    ]
    rows = rows_of(run / "metrics.jsonl")
    steps = [b["time"] - a["time"] for a, b in zip(rows, rows[1:], strict=False) if b["step"] == a["step"] + 1]
    if not (saves and steps):
        raise CheckpointError(
            f"{run} has made {len(saves)} full saves and {len(steps) + 1} steps: expected one save, two steps"
        )
    return saves, steps


# ---- command line


def in_bytes(count: float) -> str:
    """`1.5 GiB`."""
    power = min(4, int(math.log(count, 1024))) if count >= 1 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def in_time(seconds: float) -> str:
    """`90 s`, `12 min`, `5.2 h`, `3.1 days`."""
    for unit, size, digits in (("days", 2 * 86400, 1), ("h", 7200, 1), ("min", 120, 0)):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command_name", required=True)

    def add(action: Callable[[argparse.Namespace], int], *places: str) -> argparse.ArgumentParser:
        text = action.__doc__ or ""
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(action.__name__, help=text.split("\n")[0], description=text, formatter_class=form)
        for place in places:
            command.add_argument(place, type=str if place == "dest" else Path)
        command.set_defaults(action=action)
        return command

    add(ls, "folder")
    add(show, "step")
    add(verify, "path")
    comparing = add(diff, "a", "b")
    command = add(convert, "src", "dst")
    command.add_argument("--to", choices=FORMATS, required=True,
                         help="native: a step with weights alone. hf: safetensors. dcp: torch.distributed.checkpoint, "
                         "pt: torch.save, both with TorchTitan's and Meta's names and order of rows")  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="of floating-point tensors; others, and all without it, stay")
    command.add_argument("--trust-pickle", action="store_true",
                         help="load SRC whatever it names, which RUNS CODE if its author put some there. The copy "
                         "holds tensors and plain values alone. Not for --to another family of names")  # fmt: skip
    for one in (comparing, command):
        one.add_argument("--config", type=Path, help="TOML of a run with this model, where no config.toml says which")
        add_import_flag(one)
    command = add(offload, "folder", "dest")
    command.add_argument("--keep", type=int, default=2, help="newest steps that stay here (default: 2), beside pinned "
                         "ones and the newest full one")  # fmt: skip
    command.add_argument("--command", help="how to copy one step; {src} is its folder, {dst} is DEST, {name} is step-N")
    command.add_argument("--dry-run", action="store_true", help="only tell what would be copied and removed")
    command = add(interval)
    command.add_argument("--run", type=Path, help="a run's folder, to take both times from")
    command.add_argument("--save-seconds", type=float, help="of a save")
    command.add_argument("--step-seconds", type=float, help="of a training step")
    command.add_argument("--mtbf-hours", type=float, required=True, help="between failures, on average")
    command.add_argument("--interval", type=int, help="steps, to be compared")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.command_name == "offload" and arguments.keep < 1:
        print(f"--keep {arguments.keep}: expected at least 1", file=sys.stderr)
        return 2
    if arguments.command_name == "interval" and not arguments.mtbf_hours > 0:
        print(f"--mtbf-hours {arguments.mtbf_hours:g}: expected more than 0", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    try:
        code: int = arguments.action(arguments)
    except (CheckpointError, ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, DamagedError) else 2
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
