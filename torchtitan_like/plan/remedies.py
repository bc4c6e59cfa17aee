"""Find changes of a configuration with which it fits on a GPU, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchtitan_like.check import load_checked
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.loader import CommandLine
from torchtitan_like.plan.dry_memory import plan_memory
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.plan.plan_report import fits, needed_gib, verdict

NUM_CHANGES = 3


class Change(NamedTuple):
    """A change of settings that saves memory.

    cost: in words. is_possible: whether it would change this configuration.
    settings: what to add to the command line.
    """

    cost: str
    is_possible: Callable[[JobConfig], bool]
    settings: Callable[[JobConfig], list[str]]


def _accumulate(config: JobConfig) -> list[str]:
    training = config.training
    settings = [f"--training.local_batch_size={training.local_batch_size // 2}"]
    if training.global_batch_size < 0:
        return settings
    return [*settings, f"--training.global_batch_size={training.global_batch_size}"]


# In the order of their cost in time, lowest first.
CHANGES: tuple[Change, ...] = (
    Change(
        "logits exist for fewer tokens at a time, and weight gradients of the head are added more often",
        lambda config: not 0 < config.loss.chunk_mib <= 256,
        lambda config: ["--loss.chunk_mib=256"],
    ),
    Change(
        "one more all-gather of the weights for each micro-batch",
        lambda config: config.parallelism.fsdp_reshard_after_forward != "always",
        lambda config: ["--parallelism.fsdp_reshard_after_forward=always"],
    ),
    Change(
        "recomputes all but the expensive operations",
        lambda config: config.activation_checkpoint.mode == "none",
        lambda config: [
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
    ),
    Change(
        "smaller matrix products; global batches of -1 become smaller too",
        lambda config: (
            config.training.local_batch_size % 2 == 0
            and config.parallelism.pipeline_parallel_degree == 1
        ),
        _accumulate,
    ),
    Change(
        "recomputes each forward: about a third more work",
        lambda config: config.activation_checkpoint.mode not in ("full", "offload"),
        lambda config: ["--activation_checkpoint.mode=full"],
    ),
    Change(
        "exchanges activations in each layer",
        lambda config: config.parallelism.tensor_parallel_degree < 8,
        lambda config: [
            f"--parallelism.tensor_parallel_degree={2 * config.parallelism.tensor_parallel_degree}"
        ],
    ),
    Change(
        "updates on the host, and copies of all gradients and weights",
        lambda config: not config.training.enable_cpu_offload,
        lambda config: ["--training.enable_cpu_offload=true"],
    ),
)


class Remedy(NamedTuple):
    """A change after which every rank fits."""

    settings: Sequence[str]
    cost: str
    memories: list[RankMemory]


def find_remedies(config: JobConfig, world_size: int, gpu: Gpu) -> Iterator[Remedy]:
    """Yield the cheapest changes with which the configuration fits, at most `NUM_CHANGES`.

    Each is dry-run. A change that the layout does not allow is passed over.
    """
    num_found = 0
    for change in CHANGES:
        if num_found == NUM_CHANGES:
            return
        if not change.is_possible(config):
            continue
        settings = change.settings(config)
        try:
            changed, _ = load_checked(
                CommandLine(settings, base=config),
                world_size,
                training=False,
                device_type=gpu.device_type,
            )
        except ConfigError:
            continue
        memories = plan_memory(changed, world_size, gpu)
        if fits(memories, gpu):
            num_found += 1
            yield Remedy(settings, change.cost, memories)


def check_fit(config: JobConfig, world_size: int, gpu: Gpu) -> tuple[bool, list[str]]:
    """Return whether the configuration fits, and lines that say so or name changes."""
    memories = plan_memory(config, world_size, gpu)
    if fits(memories, gpu):
        return True, [verdict(memories, gpu)]
    remedies = list(find_remedies(config, world_size, gpu))
    lines = [verdict(memories, gpu)]
    if remedies:
        lines.append("It fits with one of these changes, the cheapest first:")
    else:
        lines.append("None of the single changes that were tried is enough: use more GPUs")
    for number, remedy in enumerate(remedies, start=1):
        needed = max(needed_gib(memory, gpu) for memory in remedy.memories)
        lines.append(f"  {number}. {' '.join(remedy.settings)}  ({needed:.1f} GiB; {remedy.cost})")
    return False, lines
