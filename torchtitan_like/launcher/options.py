"""Options of a launch: one table for the command line and the environment, and their checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_like.launcher.local_devices import Machine
from torchtitan_like.util.exit_codes import CRASH, WRONG_INPUT

DEFAULT_PORT = "29500"
AUTO = "auto"
NUM_CPU_RANKS = 2  # of "auto", on a machine without GPUs


class LaunchError(Exception):
    """The ranks cannot be started. ``code`` is the exit code."""

    def __init__(self, message: str, code: int = WRONG_INPUT) -> None:
        super().__init__(message)
        self.code = int(code)


class Option(NamedTuple):
    """An option: `--name` on the command line, else ``variable`` in the environment.

    ``pattern``: a regular expression of all valid values, which ``expected`` describes.
    """

    name: str
    variable: str
    metavar: str
    help: str
    pattern: str = ".*"
    expected: str = ""

    @property
    def key(self) -> str:
        """Name of the value: `log_rank` for `--log-rank`."""
        return self.name.replace("-", "_")

    def check(self, value: str) -> None:
        """Raise LaunchError if `value` is neither empty nor valid."""
        if value and not re.fullmatch(self.pattern, value):
            raise LaunchError(
                f"{self.variable}={value!r} (--{self.name}) is not valid. "
                f"Expected {self.expected}. Correct it."
            )


POSITIVE = "[1-9][0-9]{0,8}"
OPTIONS = (
    Option(
        "nproc",
        "NGPU",
        "N",
        "ranks on this machine; auto: one per GPU, or 2 without GPUs; "
        "default: 1, and auto on several machines",
        f"{POSITIVE}|{AUTO}",
        f"an integer above 0, or {AUTO}",
    ),
    Option(
        "nnodes",
        "NNODES",
        "N",
        "machines, or MIN:MAX for a run that continues with fewer or more",
        f"{POSITIVE}(:{POSITIVE})?",
        "an integer above 0, or two as MIN:MAX",
    ),
    Option(
        "node-rank",
        "NODE_RANK",
        "N",
        "number of this machine; default: in order of arrival",
        "[0-9]{1,9}",
        "an integer from 0",
    ),
    Option("master-addr", "MASTER_ADDR", "HOST", "address of one machine; the same on all of them"),
    Option(
        "master-port",
        "MASTER_PORT",
        "PORT",
        f"port on that machine; default: {DEFAULT_PORT}",
        "[0-9]{1,5}",
        "a number of a port",
    ),
    Option("rdzv-id", "RDZV_ID", "NAME", "name of the run at that port; default: torchtitan_like"),
    Option(
        "max-restarts",
        "MAX_RESTARTS",
        "N",
        "restarts of all ranks after a rank died; default: 0",
        "[0-9]{1,9}",
        "an integer, 0 or more",
    ),
    Option(
        "log-rank",
        "LOG_RANK",
        "RANKS",
        "local ranks whose output is shown, as 0,1; default: 0",
        "[0-9]{1,9}(,[0-9]{1,9})*",
        "ranks of this machine, with commas between them",
    ),
    Option(
        "log-prefix",
        "LOG_PREFIX",
        "WHAT",
        "start of each line: rank, host or digits (of the host name); default: rank on one "
        "machine, else host",
        "rank|host|digits",
        "rank, host or digits",
    ),
    Option(
        "numa-binding",
        "NUMA_BINDING",
        "WHAT",
        "keep each rank on cores near its GPU: node, socket, exclusive or core-complex",
        "node|socket|exclusive|core-complex",
        "node, socket, exclusive or core-complex",
    ),
    Option("nccl-debug-to", "NCCL_DEBUG_TO", "DIR", "folder for NCCL's log, one file per process"),
    Option(
        "known-bad-gpus",
        "KNOWN_BAD_GPUS",
        "FILE",
        "file of GPU UUIDs, one per line, that must not be used",
    ),
)


@dataclass(frozen=True)
class Launch:
    """The checked options of a launch on this machine. `read_options` creates it."""

    num_ranks: int  # on this machine
    min_nodes: int
    max_nodes: int
    max_restarts: int
    log_rank: str
    role: str  # torchrun's name of the ranks, in front of each line
    rendezvous: tuple[str, ...]  # arguments of torchrun
    numa_binding: str
    nccl_debug_to: str

    @property
    def uses_torchrun(self) -> bool:
        """Return True if the run needs more than one process without torchrun."""
        return (
            self.num_ranks * self.max_nodes > 1 or self.max_restarts > 0 or self.numa_binding != ""
        )


def read_options(
    arguments: Mapping[str, str | None], environ: Mapping[str, str], machine: Machine
) -> Launch:
    """Check the options. Raises LaunchError.

    ``arguments``: options of the command line by `Option.key`.
    """
    given = {
        option.key: arguments.get(option.key) or environ.get(option.variable, "")
        for option in OPTIONS
    }
    for option in OPTIONS:
        option.check(given[option.key])
    nnodes = given["nnodes"] or "1"
    min_nodes, _, most = nnodes.partition(":")
    bounds = int(min_nodes), int(most or min_nodes)
    if bounds[0] > bounds[1]:
        raise LaunchError(
            f"NNODES={nnodes} (--nnodes) has a minimum above its maximum. Expected MIN:MAX. "
            "Swap them."
        )
    num_ranks = _num_ranks(given["nproc"], bounds[1], machine)
    if given["numa_binding"] and machine.num_gpus == 0:
        raise LaunchError(
            f"NUMA_BINDING={given['numa_binding']} binds ranks to the CPU cores near their GPUs. "
            "Expected a machine with GPUs. Unset it."
        )
    refuse_known_bad(machine, given["known_bad_gpus"])
    return Launch(
        num_ranks=num_ranks,
        min_nodes=bounds[0],
        max_nodes=bounds[1],
        max_restarts=int(given["max_restarts"] or 0),
        log_rank=_log_rank(given["log_rank"] or "0", num_ranks),
        role=_role(given["log_prefix"] or ("rank" if bounds[1] == 1 else "host"), machine.host),
        rendezvous=_rendezvous(given, nnodes, *bounds),
        numa_binding=given["numa_binding"],
        nccl_debug_to=given["nccl_debug_to"],
    )


def refuse_known_bad(machine: Machine, path: str) -> None:
    """Raise LaunchError if the file lists a GPU of this machine. An empty path lists none."""
    if not path:
        return
    try:
        listed = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise LaunchError(
            f"KNOWN_BAD_GPUS: cannot read {path} ({error.strerror}). "
            "Expected one GPU UUID per line. Correct the path, or unset it."
        ) from error
    bad = [gpu for gpu in machine.gpu_list if any(uuid in gpu for uuid in listed)]
    if bad:
        raise LaunchError(
            f"{machine.host} has known bad GPUs: {', '.join(bad)}. Expected none of those in "
            f"{path}, so nothing was started. Use another machine, or correct the list.",
            CRASH,
        )


def torchrun_arguments(launch: Launch, log_folder: Path) -> list[str]:
    """Return torchrun's arguments, without the program."""
    return [
        f"--nproc_per_node={launch.num_ranks}",
        *launch.rendezvous,
        f"--max-restarts={launch.max_restarts}",
        *([f"--numa-binding={launch.numa_binding}"] if launch.numa_binding else []),
        "--local-ranks-filter",
        launch.log_rank,
        "--role",
        launch.role,
        "--tee",
        "3",
        "--log-dir",
        str(log_folder),
    ]


def _num_ranks(nproc: str, num_nodes: int, machine: Machine) -> int:
    """Return the number of ranks of this machine. With several machines, default to all GPUs."""
    nproc = nproc or (AUTO if num_nodes > 1 else "1")
    if nproc == AUTO:
        return machine.num_gpus or NUM_CPU_RANKS
    return int(nproc)


def _log_rank(text: str, num_ranks: int) -> str:
    if any(int(rank) >= num_ranks for rank in text.split(",")):
        raise LaunchError(
            f"LOG_RANK={text} (--log-rank) names a rank that does not exist. "
            f"Expected ranks of this machine, 0 to {num_ranks - 1}. Correct the list."
        )
    return text


def _role(prefix: str, host: str) -> str:
    roles = {"rank": "rank", "host": f"{host}:", "digits": re.sub(r"[^0-9]", "", host) + ":"}
    return roles[prefix]


def _rendezvous(
    given: Mapping[str, str], nnodes: str, min_nodes: int, max_nodes: int
) -> tuple[str, ...]:
    if max_nodes == 1:
        return ("--nnodes=1",)
    address, port = given["master_addr"], given["master_port"] or DEFAULT_PORT
    if not address:
        raise LaunchError(
            f"NNODES={nnodes} (--nnodes) is set without MASTER_ADDR. Expected the address of one of "
            "the machines. Set MASTER_ADDR (--master-addr)."
        )
    if not given["node_rank"]:
        name = given["rdzv_id"] or "torchtitan_like"
        endpoint = f"--rdzv_endpoint={address}:{port}"
        return (f"--nnodes={nnodes}", "--rdzv_backend", "c10d", endpoint, f"--rdzv_id={name}")
    if min_nodes != max_nodes:
        raise LaunchError(
            f"NODE_RANK is set, and NNODES={nnodes} is a range. Expected one number of machines. "
            "Unset NODE_RANK, or set NNODES to a number."
        )
    return (
        f"--nnodes={nnodes}",
        f"--node_rank={given['node_rank']}",
        f"--master_addr={address}",
        f"--master_port={port}",
    )
