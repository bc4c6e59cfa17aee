"""torchrun for runs: `python -m torchtitan_like.torchrun --nproc_per_node=8 -m ...`.

It takes torchrun's arguments. The differences:

- Its store listens on one address: on loopback on one machine, else on the address of MASTER_ADDR.
- The ranks end when this process does, even after SIGKILL.
- A second signal does not end it while the ranks save.
- After its ranks have ended, it waits `EXIT_BARRIER_S` for the other launchers, not 300 s.
- It returns the code of ranks that stop before the first step, 128 + N after signal N, 137 if a
  rank was killed, and 1 after any other crash. After an end that all ranks agree on it returns 0,
  and exit.json has the code.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from functools import partial
from types import FrameType

from torchtitan_like.process_start import LAUNCHER, die_with_launcher, exit_on_signals

if __name__ == "__main__":  # before the imports below, which take seconds
    exit_on_signals()
    die_with_launcher(signal.SIGTERM)

from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher import api as launcher_api

from torchtitan_like.distributed.rendezvous import register_backends
from torchtitan_like.distributed.store import LOOPBACK
from torchtitan_like.launcher.options import DEFAULT_PORT
from torchtitan_like.util.exit_codes import (
    CRASH,
    KILLED,
    LAUNCHER_SIGNALS,
    early_code,
    signal_for_ranks,
)
from torchtitan_like.util.output import show_error

# All ranks end together. A launcher that got a signal ends without a word to the others, which would
# hold their GPUs until this time is over.
EXIT_BARRIER_S = 30.0


def stop_once(signum: int, _frame: FrameType | None) -> None:
    """Let torchrun pass the signal on and wait for the ranks, which may be saving a checkpoint.

    Further signals are ignored.
    """
    for stop_signal in LAUNCHER_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    raise SignalException(f"received signal {signum}", sigval=signal_for_ranks(signum))


def main(argv: list[str]) -> int:
    """Run the ranks to their end. Return the exit code."""
    arguments = torch_run.parse_args(argv)
    set_rendezvous(arguments)
    for signum in LAUNCHER_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, stop_once)
    # torchrun must not handle LAUNCHER_SIGNALS: it would end at the second signal.
    arguments.signals_to_handle = "SIGQUIT"
    os.environ[LAUNCHER] = str(os.getpid())
    # torchrun has no option for it.
    agent = partial(LocalElasticAgent, exit_barrier_timeout=EXIT_BARRIER_S)
    launcher_api.LocalElasticAgent = agent  # type: ignore[misc, assignment]
    try:
        record(torch_run.run)(arguments)
    except SignalException as error:  # the ranks have ended
        return 128 + error.sigval
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        code = early_code(codes)
        if code is not None:
            return int(code)
        show_error(str(error))
        return KILLED if -signal.SIGKILL in codes else CRASH
    return 0


def set_rendezvous(arguments: Namespace) -> None:
    """Replace torchrun's rendezvous backend by the one of this package."""
    names = register_backends()
    _, max_nodes = torch_run.parse_min_max_nnodes(arguments.nnodes)
    backend = "loopback" if max_nodes == 1 else arguments.rdzv_backend
    if backend not in names:
        return
    if backend == "static":
        # torchrun passes the rank only to its own static backend.
        settings = [arguments.rdzv_conf, f"rank={arguments.node_rank}"]
        arguments.rdzv_conf = ",".join(filter(None, settings))
        arguments.rdzv_endpoint = f"{arguments.master_addr}:{arguments.master_port or DEFAULT_PORT}"
    if backend == "loopback":
        arguments.standalone = False
        arguments.rdzv_endpoint = f"{LOOPBACK}:0"
    arguments.node_rank = 0
    arguments.rdzv_backend = names[backend]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
