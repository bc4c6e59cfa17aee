"""A dry run of a GPU also adds up what the host holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_like.check import load_checked
from torchtitan_like.config import JobConfig
from torchtitan_like.plan.dry_memory import assumptions, dry_runs, plan_memory
from torchtitan_like.plan.gpus import load_gpu
from torchtitan_like.plan.layouts import with_settings
from torchtitan_like.plan.ledger import RankMemory

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"


def loaded(*arguments: str, name: str = "debug_model") -> JobConfig:
    argv = ["--job.config_file", str(CONFIGS / f"{name}.toml"), *arguments]
    return load_checked(argv, 1, training=False, device_type="cuda")[0]


def planned(config: JobConfig) -> RankMemory:
    (memory,) = plan_memory(config, 1, load_gpu("h100-80g"))
    return memory


def test_offloaded_activations_are_in_host_memory() -> None:
    kept, offloaded = (
        planned(loaded(f"--activation_checkpoint.mode={mode}", "--loss.chunk_mib=8"))
        for mode in ("none", "offload")
    )
    saved = kept.by_category["activations"]
    assert offloaded.by_category.get("activations", 0) < saved / 20
    # The allocator of pinned memory rounds each up to a power of two.
    assert saved < offloaded.host - kept.host < 2 * saved


def test_a_kernel_that_gpus_have_is_not_divided() -> None:
    config = loaded("--activation_checkpoint.mode=none")
    (run,) = dry_runs(config, 1, load_gpu("h100-80g"))
    step = run.recording.between("step 1", "step 2")
    num_layers = sum(item.op == "silu" for item in step)
    assert num_layers > 1
    assert sum(item.op == "silu_backward" for item in step) == num_layers
    assert not any("sigmoid" in item.op for item in step)


def test_a_plan_says_what_it_cannot_know() -> None:
    assert assumptions(loaded("--activation_checkpoint.mode=full")) == []
    budget = loaded("--activation_checkpoint.mode=memory_budget", "--compile.enable=true")
    compiled, kept = assumptions(budget)
    assert compiled.startswith("compile.enable: rules say")
    assert kept.startswith('activation_checkpoint.mode = "memory_budget": planned as "none"')


@pytest.mark.parametrize("kernel", [pytest.param("flex", marks=pytest.mark.nightly), "varlen"])
def test_kernels_of_masks_are_planned_as_causal_attention(kernel: str) -> None:
    settings = (
        "--activation_checkpoint.mode=none",
        "--loss.chunk_mib=8",
        "--training.mixed_precision_param=bfloat16",
    )
    mask = f"--model.args.attn_type={kernel}", "--model.args.attn_mask_type=block_causal"
    masked = loaded(*settings, *mask)
    causal, kept = (
        planned(config).by_category["activations"] for config in (loaded(*settings), masked)
    )
    # The mask, and the rotary tables at the positions in documents.
    assert causal < kept < 1.02 * causal
    (note,) = assumptions(masked)
    assert note.startswith(f'attn_type = "{kernel}": planned as causal attention')


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss_debug",
        pytest.param("llama4_debug", marks=pytest.mark.nightly),
        pytest.param("deepseek_v3_debug", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe_debug", marks=pytest.mark.nightly),
    ],
)
def test_each_family_is_planned_eager_and_compiled(name: str) -> None:
    config = loaded(name=name)
    eager, compiled = (
        planned(with_settings(config, {"compile.enable": enable})) for enable in (False, True)
    )
    # Not the reserved bytes: other tensors leave other gaps between them.
    assert 0 < compiled.active <= eager.active
