"""CPU ranks for tests. `run_ranks(fn, world_size, *args)` calls `fn(*args)` on every gloo rank.

The processes of a world size are started once and reused, so a distributed test takes milliseconds.
Without a GPU they are forked (0.2 s for 4 ranks). With one they are spawned, because CUDA does not
survive a fork.

The processes are stopped (SIGSTOP) between two calls. Each gloo group has a thread that wakes up
100 times a second, and the groups of a used pool would take half a core. The kernel kills the
processes when their parent dies.

Rules for `fn`
- Define it at the top level of its module. Its arguments and result must be picklable. Tensors are
  copied.
- The default process group exists. RANK, WORLD_SIZE and LOCAL_RANK are set.
- The pool resets the seed, default dtype, environment and working directory before each call. Undo
  all other changes (patches, registries, caches).
- Do not destroy process groups. DTensor caches group names by mesh. After a group is destroyed, the
  next test with an equal mesh fails (measured on torch 2.13). `run_ranks` replaces a pool that has
  too many groups or no default group.
- A failure kills the whole pool, because a gloo group is unusable after an error. If a test expects
  a failure, use `run_in_new_processes`. It does not affect the shared pool.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

GROUP_TIMEOUT = timedelta(seconds=25)
MAX_GROUPS = 64
START_TIMEOUT_SECONDS = 60.0
# Modules that tests import anyway. Importing them once before forking saves three seconds per rank.
MODULES = ("torch._dynamo.backends.debugging", "torch._functorch.aot_autograd", "torch._inductor.lowering",
           "torch.distributed.pipelining", "tokenizers", "tiktoken", "torchtitan_like.train",
           "torchtitan_like.models.dense.model")  # fmt: skip
# The peers of a failed rank hang in a collective. Wait this long for failures of their own.
GRACE_SECONDS = 0.3
PR_SET_PDEATHSIG = 1


class RankError(Exception):
    """A rank raised, died or hung. `exception` is the first exception, if it is picklable."""

    def __init__(self, message: str, rank: int, exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception


@dataclass(frozen=True)
class _Success:
    value: Any
    is_reusable: bool


@dataclass(frozen=True)
class _Failure:
    text: str
    exception: BaseException | None
    has_died: bool = False


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60) -> list[T]:
    """Call `fn(*args)` on each rank of the shared pool. Return the results in rank order.

    Raises RankError with the traceback of a rank that raises or dies. After `timeout` seconds,
    raises it with the stacks of the ranks that did not answer. The next call then gets new
    processes.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = RankPool(world_size)
    try:
        return pool.run(fn, args, timeout)
    finally:
        if not pool.is_reusable:
            pool.kill()
            del _pools[world_size]


def run_in_new_processes(
    fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60
) -> list[T]:
    """Like `run_ranks`, in new processes that are not reused. For expected failures."""
    pool = RankPool(world_size)
    try:
        return pool.run(fn, args, timeout)
    finally:
        pool.kill()


def kill_all_pools() -> None:
    """Kill every rank of every pool. The next `run_ranks` starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


class RankPool:
    """The processes of one world size, idle between two calls of `run`."""

    def __init__(self, world_size: int) -> None:
        self.is_reusable = True
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        torch.set_num_threads(1)  # a forked child cannot use its parent's thread pool
        for module in MODULES:
            importlib.import_module(module)
        try:
            self._start(world_size)
        except BaseException:
            self.kill()
            raise

    def _start(self, world_size: int) -> None:
        context: Any = mp.get_context("spawn" if torch.cuda.is_available() else "fork")
        port = 0
        for rank in range(world_size):
            parent_end, child_end = context.Pipe()
            arguments = (rank, world_size, port, child_end, self._stack_file(rank), os.getpid())
            process = context.Process(
                target=_serve, args=arguments, name=f"rank{rank}of{world_size}"
            )
            process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)
            if rank == 0:  # it hosts the store. The system chooses a free port
                port = self._receive_port()
        self._answers(START_TIMEOUT_SECONDS)
        self._signal(signal.SIGSTOP)

    def run(self, fn: Callable[..., T], args: tuple[Any, ...], timeout: float) -> list[T]:
        """Call `fn(*args)` on every rank. After a failure the pool is not reusable."""
        self.is_reusable = False
        task = _pickled_task(fn, args)
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send_bytes(task)
        successes = self._answers(timeout)
        self._signal(signal.SIGSTOP)
        self.is_reusable = all(success.is_reusable for success in successes)
        return [success.value for success in successes]

    def kill(self) -> None:
        """Kill the processes and wait until they have ended."""
        self.is_reusable = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def _signal(self, signum: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, signum)

    def _receive_port(self) -> int:
        if not self._connections[0].poll(START_TIMEOUT_SECONDS):
            raise RankError("rank 0 did not open its store", 0)
        return int(pickle.loads(self._connections[0].recv_bytes()))

    def _answers(self, timeout: float) -> list[_Success]:
        """Return the success of each rank, or raise the failure of the first rank that failed."""
        answers: dict[int, _Success | _Failure] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._processes):
            failed = any(isinstance(answer, _Failure) for answer in answers.values())
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            waiting = {
                self._connections[r]: r for r in range(len(self._processes)) if r not in answers
            }
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise (
                    self._failure_error(answers)
                    if failed
                    else self._timeout_error(sorted(waiting.values()), timeout)
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = _Failure(self._describe_death(rank), None, has_died=True)
        if any(isinstance(answer, _Failure) for answer in answers.values()):
            raise self._failure_error(answers)
        return [answers[rank] for rank in sorted(answers)]  # type: ignore[misc] # all are successes

    def _failure_error(self, answers: dict[int, _Success | _Failure]) -> RankError:
        """Name the first rank that failed, but a dead rank before those that raised.

        The system closes the sockets of a dead process in any order. A peer can notice a closed
        gloo socket and answer before the pool sees the end of the dead rank's pipe.
        """
        failures = [
            (rank, answer) for rank, answer in answers.items() if isinstance(answer, _Failure)
        ]
        failures.sort(key=lambda item: not item[1].has_died)  # stable: then in order of arrival
        size = len(self._processes)
        text = "\n".join(f"rank {rank} of {size}:\n{failure.text}" for rank, failure in failures)
        first, failure = failures[0]
        return RankError(text, first, failure.exception)

    def _timeout_error(self, ranks: list[int], timeout: float) -> RankError:
        text = [f"no answer from rank {', '.join(map(str, ranks))} within {timeout:g} s"]
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        for rank in ranks:
            text += [f"stacks of rank {rank}:", self._stacks(rank)]
        return RankError("\n".join(text), ranks[0])

    def _stacks(self, rank: int) -> str:
        """Return faulthandler's output once it stops growing, or "" if the rank cannot write."""
        text, deadline = "", time.monotonic() + 5
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, text = text, self._stack_file(rank).read_text()
            if text and text == before:
                break
        return text

    def _describe_death(self, rank: int) -> str:
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        message = (
            f"the process ended without an answer (exit code {code}; a negative one is a signal's "
            "number)"
        )
        return "\n".join([message, self._stack_file(rank).read_text()]).rstrip()

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stacks-{rank}"


_pools: dict[int, RankPool] = {}
atexit.register(kill_all_pools)


def _pickled_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{fn!r} and its arguments must be picklable: a function at the top level of its "
            "module, plain arguments"
        ) from error


def _serve(
    rank: int, world_size: int, port: int, connection: Connection, stack_file: Path, parent: int
) -> None:
    """Run one rank: join the world, then answer tasks until the process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(0)
    with open(stack_file, "w") as stacks:
        faulthandler.enable(file=stacks, all_threads=True)  # after a fatal signal
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False
        )
        if rank == 0:
            connection.send_bytes(pickle.dumps(store.port))
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
            }
            | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        # A run unfreezes its objects at the end. Collections would then scan all modules (0.25 s).
        freeze, gc.freeze, gc.unfreeze = gc.freeze, _nothing, _nothing
        freeze()
        connection.send_bytes(pickle.dumps(_Success(None, True)))
        while True:
            answer = _answer(connection.recv_bytes())
            gc.collect()
            freeze()  # objects that the call imported and cached
            connection.send_bytes(answer)


def _nothing() -> None: ...


def _answer(task: bytes) -> bytes:
    try:
        with _fresh_state():
            sys.path[:], call = pickle.loads(task)
            fn, args = pickle.loads(call)
            value = fn(*args)
        answer = pickle.dumps(_Success(value, _is_reusable()))
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
            answer = pickle.dumps(_Failure(traceback.format_exc(), error))
        except Exception:
            answer = pickle.dumps(_Failure(traceback.format_exc(), None))
    return answer


@contextmanager
def _fresh_state() -> Iterator[None]:
    environment, folder = dict(os.environ), os.getcwd()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


def _is_reusable() -> bool:
    return dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) <= MAX_GROUPS
