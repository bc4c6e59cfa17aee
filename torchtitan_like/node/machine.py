"""Check one machine: its GPUs, every pair of them, and host memory."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Set
from dataclasses import dataclass

from torchtitan_like.util.host import available_bytes
from torchtitan_like.util.units import GIB

ANSWER_SECONDS = 60.0  # for nvidia-smi, which hangs with a broken driver
HOT = 84  # degrees Celsius, above which a GPU slows down
XID = re.compile(r"NVRM: Xid \((?P<gpu>[^)]*)\): (?P<number>\d+)")
# Fields of nvidia-smi, and their good values. A GPU without the feature reports [N/A].
QUERY = {
    "index": None,
    "uuid": None,
    "temperature.gpu": None,
    "ecc.errors.uncorrected.volatile.total": ("0",),
    "retired_pages.pending": ("No",),
    "remapped_rows.pending": ("No", "0"),
    "remapped_rows.failure": ("No", "0"),
    "clocks_throttle_reasons.hw_slowdown": ("Not Active",),
}
NOT_AVAILABLE = ("[N/A]", "N/A", "[Not Supported]")


@dataclass(frozen=True)
class MachineReport:
    """Result of a check. The machine is fit for training if there are no problems."""

    host: str
    num_gpus: int
    problems: list[str]

    def line(self) -> str:
        """Return the line that `titan node check` prints."""
        if self.problems:
            return f"{self.host} is BAD: {'; '.join(self.problems)}"
        return f"{self.host} is OK ({self.num_gpus} GPUs)"


def host_name() -> str:
    """Return the name of this machine, without its domain."""
    return socket.gethostname().partition(".")[0]


def check_machine(
    *,
    num_gpus: int | None,
    known_bad: Set[str],
    host_memory_gib: float,
    checks_pairs: bool,
    timeout: float,
) -> MachineReport:
    """Check this machine.

    num_gpus: how many it must have; None: any number. known_bad: UUIDs of GPUs. host_memory_gib:
    how much must be available. checks_pairs: let every pair of GPUs all-reduce. timeout: seconds
    for a pair.
    """
    csv = output("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    num_present = len(csv.splitlines())
    problems = gpu_problems(csv, num_gpus, known_bad)
    if num_present:
        problems += xid_problems(output("dmesg"))
        if not problems and checks_pairs:
            problems += pair_problems(num_present, timeout)
    available = available_bytes() / GIB
    if available < host_memory_gib:
        problems.append(
            f"{available:.1f} GiB of host memory are available instead of {host_memory_gib:g}"
        )
    return MachineReport(host_name(), num_present, problems)


def gpu_problems(csv: str, num_gpus: int | None, known_bad: Set[str]) -> list[str]:
    """Return the problems of the GPUs. csv: nvidia-smi's output for QUERY (noheader, nounits)."""
    rows = [[word.strip() for word in line.split(",")] for line in csv.splitlines() if line.strip()]
    problems = []
    if num_gpus not in (None, len(rows)):
        problems.append(f"{len(rows)} GPUs instead of {num_gpus}")
    for row in rows:
        if len(row) != len(QUERY):
            problems.append(f"nvidia-smi printed {', '.join(row)!r}")
            continue
        values = dict(zip(QUERY, row, strict=True))
        name = f"GPU {values['index']}"
        for key, good in QUERY.items():
            if good is not None and values[key] not in (*good, *NOT_AVAILABLE):
                problems.append(f"{name}: {key} is {values[key]}")
        temperature = values["temperature.gpu"]
        if temperature.isdecimal() and int(temperature) >= HOT:
            problems.append(f"{name}: {temperature} degrees")
        if values["uuid"] in known_bad:
            problems.append(f"{name}: {values['uuid']} is known to be bad")
    return problems


def xid_problems(kernel_log: str) -> list[str]:
    """Return the driver's errors, each number of each GPU once."""
    errors = {(match["gpu"], int(match["number"])) for match in XID.finditer(kernel_log)}
    return [f"Xid {number} of {gpu}" for gpu, number in sorted(errors)]


def output(*command: str) -> str:
    """Return what a command prints: "" if it does not exist, a sentence if it hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_SECONDS:g} s"
    return done.stdout


def pair_problems(num_gpus: int, timeout: float) -> list[str]:
    """Return the pairs of GPUs that fail to all-reduce. A bad GPU shows in all of its pairs."""
    problems = []
    for pair in itertools.combinations(range(num_gpus), 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "torchtitan_like"]
        command += ["node", "check", "--ranks", "--timeout", str(timeout)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, pair))}
        try:
            done = subprocess.run(command, env=env, capture_output=True, timeout=3 * timeout)
            has_failed = done.returncode != 0
        except subprocess.TimeoutExpired:
            has_failed = True
        if has_failed:
            problems.append(f"GPUs {pair[0]} and {pair[1]} do not reach each other")
    return problems
