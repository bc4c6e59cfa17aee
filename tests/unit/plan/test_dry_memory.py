"""A dry run of a GPU also adds up what the host holds."""

from __future__ import annotations

from pathlib import Path

from torchtitan_like.config import JobConfig
from torchtitan_like.plan.dry_memory import assumptions, plan_memory
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.ledger import RankMemory
from torchtitan_like.preflight import load_checked

CONFIG = Path(__file__).resolve().parents[3] / "train_configs/debug_model.toml"


def loaded(*arguments: str) -> JobConfig:
    argv = ["--job.config_file", str(CONFIG), *arguments]
    return load_checked(argv, 1, training=False, device_type="cuda")[0]


def planned(mode: str) -> RankMemory:
    config = loaded(f"--activation_checkpoint.mode={mode}", "--loss.chunk_mib=8")
    (memory,) = plan_memory(config, 1, load_gpu("h100-80g"))
    return memory


def test_offloaded_activations_are_in_host_memory() -> None:
    kept, offloaded = planned("none"), planned("offload")
    saved = kept.by_category["activations"]
    assert offloaded.by_category.get("activations", 0) < saved / 20
    # The allocator of pinned memory rounds each up to a power of two.
    assert saved < offloaded.host - kept.host < 2 * saved


def test_a_plan_says_what_it_cannot_know() -> None:
    assert assumptions(loaded("--activation_checkpoint.mode=full")) == []
    budget = loaded("--activation_checkpoint.mode=memory_budget", "--compile.enable=true")
    compiled, kept = assumptions(budget)
    assert compiled.startswith("compile.enable: rules say")
    assert kept.startswith('activation_checkpoint.mode = "memory_budget": planned as "none"')
