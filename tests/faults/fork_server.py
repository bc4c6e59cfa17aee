"""A process that imports torch once and forks the ranks of runs. A start takes 1 s instead of 6 s.

Ranks run `torchtitan_like.run.main` in real processes with a real rendezvous; they share only
the start of the interpreter and the imports. Like torchrun, the parent stops all ranks after a
crash.

Protocol, one JSON object per line: the request has {"argv", "num_ranks", "log", "injections",
"settings"}. The first answer has {"pids"}, the second one, at the end of the run, {"codes"}.
A negative code is the signal that ended the rank.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from tests.harness.ports import free_ports

PR_SET_PDEATHSIG = 1
# Imports of a run. None of these modules starts a thread.
MODULES = (
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "tokenizers",
    "safetensors",
    "torchtitan_like.train",
)
# Seconds from SIGTERM to SIGKILL. torchrun waits 30 s.
GRACE_SECONDS = 4.0


def serve() -> None:
    """Fork the requested runs until stdin ends."""
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # garbage collections of ranks skip the modules
    sys.modules["torch"].set_num_threads(1)  # a forked child cannot use its parent's thread pool
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        [port] = free_ports(1)
        pids = [_fork(rank, port, request) for rank in range(request["num_ranks"])]
        print(json.dumps({"pids": pids}), file=answers)
        print(json.dumps({"codes": _wait_for(pids)}), file=answers)


def _fork(rank: int, port: int, request: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)
        _become_rank(rank, port, request)
    return pid


def _become_rank(rank: int, port: int, request: dict[str, Any]) -> NoReturn:
    size = str(request["num_ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        from tests.faults.injection import Injection, install_injections
        from torchtitan_like.resilience.end import end_process
        from torchtitan_like.run import main

        install_injections(
            [Injection(*fields) for fields in request["injections"]], request["settings"]
        )
        sys.argv[1:] = request["argv"]
        end_process(main(sys.argv[1:]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _wait_for(pids: list[int]) -> list[int]:
    """Return the exit codes. After the first crash, end the others with SIGTERM, then SIGKILL."""
    codes: dict[int, int] = {}
    failed_at = None
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        running = [p for p in pids if p not in codes]
        if pid and (codes[pid] < 0 or codes[pid] == 1) and failed_at is None:
            failed_at = time.monotonic()
            for other in running:
                os.kill(other, signal.SIGTERM)
        if failed_at is not None and time.monotonic() > failed_at + GRACE_SECONDS:
            for other in running:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.002)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve()
