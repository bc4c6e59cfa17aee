"""What this attempt ran in: enough to say later why two runs differ. Secrets are masked, nothing is sent anywhere."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchtitan_like.monitor.memory import cpu_model, host_memory_bytes

GIT_TIMEOUT_S = 10.0
MAX_DIFF_BYTES = 4 * 1024**2
# Whatever git shows by a user's own settings.
AS_A_PATCH = "--no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/".split()
MASKED = "<masked>"

_SECRET_NAME = re.compile(
    r"(?<!tik)token(?!iz)|secret|passw|passphrase|credential|api_?key|access_?key|private|auth|cookie|signature"
    r"|(^|_)(key|keys|pat|pw|dsn)(_|$)|_pwd$",
    re.IGNORECASE,
)
# Values that are secrets whatever they are called: well-known token prefixes, and passwords within addresses.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_ADDRESS_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def mask_value(name: str, value: str) -> str:
    """``value`` of an environment variable, masked wholly when its name or its look says that it is a secret."""
    if value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
        return MASKED
    return mask_text(value)


def mask_text(text: str) -> str:
    """``text`` without logins in addresses and without well-known tokens."""
    return _SECRET_VALUE.sub(MASKED, _ADDRESS_LOGIN.sub(MASKED, text))


def write_environment(
    folder: Path, variables: Mapping[str, str] | None = None, argv: Iterable[str] | None = None
) -> None:
    """Fill ``folder``: variables.txt, packages.txt, facts.json, git.txt and, where there is one, uncommitted.diff.

    Each is plain sorted text, so that ``diff -r`` of two attempts shows what changed. Takes what git takes: run it in a
    thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = dict(os.environ) if variables is None else variables
    lines = [f"{name}={mask_value(name, variables[name])}" for name in sorted(variables)]
    _write(folder / "variables.txt", lines)
    names, editables = packages(sys.path)
    _write(folder / "packages.txt", names)
    facts: dict[str, object] = {
        "argv": _mask_argv(sys.argv if argv is None else argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "system": platform.platform(),
        "python": sys.version,
        "cpu": cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": host_memory_bytes(),
        **numeric_facts(),
    }
    _write(folder / "facts.json", [json.dumps(facts, indent=2)])
    _write_git(folder, [Path(__file__).resolve().parents[1], *editables])


def numeric_facts() -> dict[str, object]:
    """What decides the last bit of a result: torch, vector level, threads, and the GPUs with their libraries."""
    import torch

    facts: dict[str, object] = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.cuda.is_available():
        devices = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        facts["gpus"] = [f"{gpu.name}, {gpu.total_memory} bytes, capability {gpu.major}.{gpu.minor}" for gpu in devices]
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = Path("/sys/module/nvidia/version")
        facts["gpu_driver"] = driver.read_text().strip() if driver.exists() else None
    return facts


def packages(paths: Iterable[str]) -> tuple[list[str], list[Path]]:
    """Installed packages as sorted ``name==version``, and the source folders of those installed as editable.

    Read from the names of the ``.dist-info`` folders (a first one on the path hides later ones), without opening their
    metadata: hundreds of small files would be slow on a shared disk.
    """
    found: dict[str, str] = {}
    editables: list[Path] = []
    for path in dict.fromkeys(paths):
        for entry in sorted(Path(path or ".").glob("*.dist-info")):
            name, _, version = entry.name.removesuffix(".dist-info").partition("-")
            if name in found:
                continue
            found[name] = version
            if (source := _editable_source(entry / "direct_url.json")) is not None:
                editables.append(source)
    return sorted(f"{name}=={version}" for name, version in found.items()), editables


def _editable_source(direct_url: Path) -> Path | None:
    """The folder that PEP 610's direct_url.json names, when the package is an editable one."""
    try:
        data = json.loads(direct_url.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_editable = data.get("dir_info", {}).get("editable", False)
    return Path(data["url"].removeprefix("file://")) if is_editable and data["url"].startswith("file://") else None


def git_state(folder: Path) -> tuple[list[str], str] | None:
    """Facts and uncommitted diff of the checkout whose tracked files include ``folder``; None where there is none."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    # A package inside somebody else's checkout (a virtual environment in a project, say) is none of its files.
    if top is None or not _git(folder, "ls-files", "--", "."):
        return None
    commit = (_git(folder, "rev-parse", "--verify", "HEAD") or "none yet").strip()
    changed = (_git(folder, "status", "--porcelain") or "").rstrip("\n").splitlines()
    diff = _git(folder, "diff", "HEAD", "--binary", *AS_A_PATCH) or ""
    if len(diff) > MAX_DIFF_BYTES:
        diff = f"{diff[:MAX_DIFF_BYTES]}\n... {len(diff) - MAX_DIFF_BYTES} more characters left out\n"
    facts = [f"checkout {top.strip()}", f"commit {commit}", f"{len(changed)} changed or untracked files", *changed]
    return facts, mask_text(diff)


def _git(folder: Path, *arguments: str) -> str | None:
    """git's output; None when it failed, is not installed or did not answer in time."""
    # GIT_OPTIONAL_LOCKS=0: only look; never refresh the index under a user's own git command.
    command, env = ["git", "-C", str(folder), *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=GIT_TIMEOUT_S, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _write_git(folder: Path, sources: Iterable[Path]) -> None:
    lines: list[str] = []
    diffs = ""
    for source in dict.fromkeys(sources):
        state = git_state(source)
        if state is not None and state[0][0] not in lines:
            lines += state[0]
            diffs += state[1]
    _write(folder / "git.txt", lines or ["the package is in no git checkout"])
    if diffs:
        (folder / "uncommitted.diff").write_text(diffs, encoding="utf-8")


def _mask_argv(argv: Iterable[str]) -> list[str]:
    """Arguments, with the values of ``--name value`` and ``--name=value`` treated as those of variables."""
    masked: list[str] = []
    name = ""
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if argument.startswith("--"):
            masked.append(flag + equals + mask_value(flag, value) if equals else argument)
            name = "" if equals else flag
        else:
            masked.append(mask_value(name, argument))
            name = ""
    return masked


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
