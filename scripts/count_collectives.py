"""Count the collectives of one step of a layout: kind, number, and bytes for each mesh dimension.

    python scripts/count_collectives.py train_configs/debug_model.toml --world-size 4 --parallelism.tensor_parallel_degree 2

Starts that many CPU ranks (gloo), runs two steps, and counts the collectives of the second step on
every rank. Uses no GPU. The model must be small enough for this machine; docs/guides/parallelism.md
explains how the counts scale. Compilation is disabled: compiled blocks send the same collectives.
The script saves no checkpoint.

Exit codes: 0; 78 for an invalid config; 1 for any other failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchtitan_like.distributed.world import LaunchedAs, World
    from torchtitan_like.resilience.agreement import Requests
    from torchtitan_like.resilience.heartbeat import RankPosition
    from torchtitan_like.resolved import Run
    from torchtitan_like.util.exit_codes import ExitCode

WORKER = "--worker"
MIB = 2**20
# Substring of an operator's name in torch -> kind of collective. The first match applies.
KINDS = {
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
}
# In a ring of n ranks, each one sends (n - 1)/n times this many whole tensors.
SENT = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
# Settings for a step that only trains: no checkpoints, no validation, a temporary folder.
SETTINGS = (
    "--training.steps=2 --checkpoint.enable=false --validation.enable=false --compile.enable=false "
    "--metrics.enable_tensorboard=false --metrics.enable_wandb=false --profiling.enable_profiling=false"
).split()


@dataclass(frozen=True)
class Row:
    """All collectives of one kind over one dimension.

    nbytes: total bytes of their full tensors. sent: bytes that this rank sends.
    """

    over: str
    ranks: int
    kind: str
    number: int
    largest: int
    nbytes: int
    sent: float


def kind_of(operator: str) -> str | None:
    """Return the kind of a collective; None for operators that send nothing, such as a receive."""
    return next((kind for word, kind in KINDS.items() if word in operator), None)


def rows_of(collectives: Iterable[tuple[str, int, str, int]]) -> list[Row]:
    """Sum collectives, each given as (dimension, ranks, kind, bytes of the full tensor)."""
    sizes_by_key: dict[tuple[str, int, str], list[int]] = {}
    for over, ranks, kind, nbytes in collectives:
        sizes_by_key.setdefault((over, ranks, kind), []).append(nbytes)
    return [
        Row(
            *key,
            len(sizes),
            max(sizes),
            sum(sizes),
            sum(sizes) * SENT.get(key[2], 0) * (key[1] - 1) / key[1] or sum(sizes),
        )
        for key, sizes in sorted(sizes_by_key.items())
    ]


# ---- a rank


def count(world: World, step: Any) -> tuple[Any, list[Row]]:
    """Call `step` and count its collectives. Return its result, and the rows."""
    import torch
    from torch.distributed import ProcessGroup
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    names = {group.group_name: (name, group.size()) for name, group in world.groups.items()}
    log: list[tuple[str, int, str, int]] = []

    def group_of(leaves: list[Any]) -> tuple[str, int]:
        """Return the name and size of the group, which operators store by name or object."""
        for leaf in leaves:
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
                group = ProcessGroup.unbox(leaf)
                return names.get(group.group_name, ("bookkeeping", group.size()))
        return next(names[leaf] for leaf in leaves if isinstance(leaf, str) and leaf in names)

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            kind = (
                kind_of(str(function))
                if function.namespace in ("c10d", "_c10d_functional")
                else None
            )
            if kind is not None:
                leaves = tree_leaves((args, kwargs))
                tensors = [
                    leaf
                    for leaf in [*leaves, *tree_leaves(result)]
                    if isinstance(leaf, torch.Tensor)
                ]
                log.append((*group_of(leaves), kind, max(tensor.nbytes for tensor in tensors)))
            return result

    with Log():
        result = step()
    return result, rows_of(log)


def work(run: Run, launched: LaunchedAs, requests: Requests, position: RankPosition) -> ExitCode:
    """Run two training steps. Rank 0 writes the counts of all ranks in the second step."""
    from torchtitan_like.build import attach, build_checkpointer
    from torchtitan_like.run import build_world
    from torchtitan_like.train import Trainer

    world = build_world(run, launched)
    last_rows: list[Row] = []
    with closing(build_checkpointer(run, world)) as checkpointer:
        starts = checkpointer.find_start(run.config.training.steps)
        trainer: Any = Trainer(attach(run, world, checkpointer, starts, requests, position))
        train_step = trainer.train_step

        def counted(step: int, *rest: Any) -> Any:
            result, rows = count(world, lambda: train_step(step, *rest))
            last_rows[:] = rows  # of the last step: the first one also creates caches
            return result

        trainer.train_step = counted
        code: ExitCode = trainer.train()
        trainer.close()
    of_ranks = world.step_group.gather_objects([vars(row) for row in last_rows])
    if world.rank == 0:
        lines = {"shape": world.dims.mesh_shape(), "ranks": of_ranks}
        (Path(run.config.job.dump_folder) / "collectives.json").write_text(json.dumps(lines))
    world.leave()
    return code


# ---- the command


def table(shape: dict[str, int], of_ranks: list[list[Row]]) -> list[str]:
    """Return the lines of one table for each set of ranks with equal counts."""
    layout = " x ".join(f"{name} {size}" for name, size in shape.items())
    lines = [f"One step of {len(of_ranks)} rank{'s' * (len(of_ranks) > 1)}: {layout}"]
    different: dict[tuple[Row, ...], list[int]] = {}
    for rank, counted in enumerate(of_ranks):
        different.setdefault(tuple(counted), []).append(rank)
    for rows, ranks in different.items():
        who = (
            "each rank"
            if len(different) == 1
            else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        )
        lines += [
            "",
            f"{who}:",
            f"{'over':>18}  {'collective':14} {'number':>6} {'largest':>12} {'in all':>12} {'sent':>12}",
        ]
        lines += [
            f"{f'{row.over} ({row.ranks})':>18}  {row.kind:14} {row.number:6}"
            f" {_size(row.largest):>12} {_size(row.nbytes):>12} {_size(row.sent):>12}"
            for row in rows
        ] or ["  nothing"]
    return lines


def _size(nbytes: float) -> str:
    return f"{nbytes / MIB:,.3f} MiB" if nbytes >= MIB / 1000 else f"{nbytes:,.0f} B"


def main(argv: list[str]) -> int:
    """Run the command. Return its exit code."""
    if argv[:1] == [WORKER]:
        from torchtitan_like.run import main

        return main(argv[1:], work)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--world-size", type=int, default=1, help="CPU ranks to start (1)")
    options, arguments = parser.parse_known_args(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--job.config_file", arguments[0]]
    with tempfile.TemporaryDirectory() as folder:
        arguments += [*SETTINGS, f"--job.dump_folder={folder}"]
        check = [
            sys.executable,
            "-m",
            "torchtitan_like",
            "check",
            "--training",
            "--world-size",
            str(options.world_size),
        ]
        # Include the working folder, as `python -m` does: it may contain a custom model.
        path = os.pathsep.join(filter(None, (str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH"))))
        environ = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        checked = subprocess.run(
            [*check, "--device-type", "cpu", *arguments],
            capture_output=True,
            text=True,
            env=environ,
        )
        if checked.returncode:
            print(checked.stderr, file=sys.stderr, end="")
            return checked.returncode
        run = [
            sys.executable,
            "-m",
            "torchtitan_like.torchrun",
            "--nproc_per_node",
            str(options.world_size),
        ]
        run += [__file__, WORKER, *arguments]
        done = subprocess.run(run, capture_output=True, text=True, env=environ)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr, end="")
            return 1
        counts = json.loads((Path(folder) / "collectives.json").read_text())
    print(
        "\n".join(
            table(counts["shape"], [[Row(**row) for row in rows] for rows in counts["ranks"]])
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
