"""The layouts of a search: counts by hand, the rules of check, and the settings of a layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_like.check import check_config, check_layout, load_checked
from torchtitan_like.config import JobConfig
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan.layouts import (
    Layout,
    Space,
    apply,
    divisors,
    keeps_given_settings,
    meshes,
    settings_of,
    variants,
    with_faster_kernels,
    with_float8,
)
from torchtitan_like.plan.search import space_of

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"


def space(name: str, world_size: int, global_batch: int, *settings: str) -> Space:
    argv = ["--job.config_file", str(CONFIGS / f"{name}.toml"), *settings]
    config, _ = load_checked(argv, None, training=False, device_type="cuda")
    return space_of(config, world_size, 8, global_batch)


def all_layouts(of: Space) -> list[Layout]:
    return [layout for mesh in meshes(of) for layout in variants(of, mesh)]


NO_AC = "--activation_checkpoint.mode=none"


def test_the_meshes_of_two_ranks_are_counted_by_hand() -> None:
    """Six layers and two ends are eight slots: eight stages at most, four on each rank."""
    found = [(mesh.name, mesh.pipeline) for mesh in meshes(space("debug_model", 2, 8, NO_AC))]
    names = Counter(name for name, _ in found)
    assert names == {"DDP 2": 1, "FSDP 2": 1, "TP 2": 1, "PP 2": 6}
    assert [tuple(pipeline) for name, pipeline in found if pipeline is not None] == [
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 4),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ]


def test_the_variants_of_two_ranks_are_counted_by_hand() -> None:
    """Micro-batches x recomputation (none, op, full) x resharding (only where FSDP shards)."""
    of = space("debug_model", 2, 8, NO_AC)
    counts = Counter(layout.name for layout in all_layouts(of))
    # FSDP and DDP: 4 samples of a rank in 1, 2 or 4. TP and PP: 8 samples in 1, 2, 4 or 8.
    assert counts == {"FSDP 2": 3 * 3 * 2, "DDP 2": 3 * 3, "TP 2": 4 * 3, "PP 2": 6 * 4 * 3}
    for layout in all_layouts(of):
        assert layout.num_micro * layout.micro_batch * layout.dp == of.global_batch
        assert layout.pp * layout.replicate * layout.shard * layout.cp * layout.tp == 2


def test_the_recomputation_of_the_configuration_is_one_of_the_variants() -> None:
    of = space("debug_model", 1, 1, "--activation_checkpoint.mode=selective",
               "--activation_checkpoint.selective_ac_option=3")  # fmt: skip
    assert [layout.recompute for layout in all_layouts(of)] == ["every n", "none", "op", "full"]


def test_long_sequences_are_sharded() -> None:
    short = {mesh.cp for mesh in meshes(space("llama3_8b", 16, 16))}
    long = {mesh.cp for mesh in meshes(space("llama3_8b", 16, 16, "--training.seq_len=32768"))}
    assert short == {1} and long == {1, 2, 4, 8, 16}


def test_experts_are_sharded_with_tensor_parallelism_or_not() -> None:
    kinds = {(mesh.tp, mesh.expert_tp) for mesh in meshes(space("qwen3_moe_debug", 4, 8))}
    assert kinds == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)}


def test_the_degrees_of_experts_are_all_that_check_accepts() -> None:
    """Six experts on four ranks: 4 divides the ranks and not the experts, 3 the experts alone."""
    of = space("qwen3_moe_debug", 4, 8, "--model.args.num_experts=6", "--model.args.top_k=2")
    spec = get_spec("qwen3")
    args = resolve_args(spec, "debugmodel_moe", of.config.model.args)
    meshes_of = [mesh for mesh in meshes(of) if mesh.pp == 1]
    found = {
        mesh
        for mesh in meshes_of
        if mesh.ep > 1 and not check_layout(apply(mesh, of), 4, spec, args)
    }
    expected = {
        other
        for mesh in meshes_of
        if mesh.ep == 1
        for other in (replace(mesh, ep=ep) for ep in range(2, 9))
        if not check_layout(apply(other, of), 4, spec, args)
    }
    assert found == expected
    assert {mesh.name for mesh in found} == {
        "FSDP 4 x EP 2",
        "HSDP 2 x 2 x EP 2",
        "TP 2 x FSDP 2 x EP 2",
        "TP 2 x FSDP 2 x EP 2 x ETP 2",
        "TP 4 x EP 2",
    }


def test_a_dense_model_has_no_degrees_of_experts() -> None:
    assert {(mesh.ep, mesh.expert_tp) for mesh in meshes(space("debug_model", 4, 8))} == {(1, 1)}


def errors(config: JobConfig, world_size: int) -> set[str]:
    found = check_config(config, world_size, training=False, device_type="cuda")
    micro_batches = "parallelism.pipeline_parallel_microbatch_size"  # a warning before training
    return {
        problem.rule or problem.key
        for problem in found
        if problem.severity == "error" or problem.key == micro_batches
    }


@pytest.mark.parametrize(
    ("name", "world_size", "batch"),
    [("debug_model", 4, 12), ("qwen3_moe_debug", 4, 8), ("llama3_8b", 8, 16)],
)
def test_layouts_are_refused_as_check_refuses_them(name: str, world_size: int, batch: int) -> None:
    """The short check of a layout finds the same errors as the whole check, or none as it does."""
    of = space(name, world_size, batch)
    spec = get_spec(of.config.model.name)
    args = resolve_args(spec, of.config.model.flavor, of.config.model.args)
    outcomes = Counter()
    layouts = all_layouts(of)
    for layout in layouts[:: len(layouts) // 20 + 1]:
        config = apply(layout, of)
        short = {
            problem.rule or problem.key for problem in check_layout(config, world_size, spec, args)
        }
        assert short == errors(config, world_size), layout
        outcomes[bool(short)] += 1
    assert outcomes[False] > 2, outcomes
    assert outcomes[True] > 0 or name == "qwen3_moe_debug", outcomes


def test_settings_are_only_those_that_differ() -> None:
    of = space("llama3_8b", 16, 32)
    mesh = next(mesh for mesh in meshes(of) if mesh.name == "PP 2 x TP 2 x FSDP 4")
    assert mesh.pipeline is not None
    assert settings_of(mesh, of) == {
        "training.global_batch_size": 32,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.pipeline_parallel_degree": 2,
    }
    config = apply(mesh, of)
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.activation_checkpoint == of.config.activation_checkpoint


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_number_of_stages_is_the_one_that_check_derives(stages: int) -> None:
    of = space("llama3_405b", 64, 64)
    from torchtitan_like.distributed.stages import plan_stages

    mesh = next(
        mesh for mesh in meshes(of) if mesh.pp == 8 and mesh.pipeline == ("Interleaved1F1B", stages)
    )
    spec = get_spec("llama3")
    args = resolve_args(spec, "405B", {})
    assert plan_stages(spec, args, apply(mesh, of).parallelism).num_stages == 8 * stages


def test_settings_of_the_command_line_are_kept() -> None:
    of = space("debug_model", 4, 8, "--parallelism.tensor_parallel_degree=2")
    kept = [layout for layout in all_layouts(of) if keeps_given_settings(layout, of)]
    assert {layout.tp for layout in kept} == {2} and len(kept) > 10
    free = space("debug_model", 4, 8)
    assert all(keeps_given_settings(layout, free) for layout in all_layouts(free))


@pytest.mark.parametrize(
    ("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (9, [1, 3, 9])]
)
def test_divisors(number: int, expected: list[int]) -> None:
    assert divisors(number) == expected


def test_faster_kernels_are_those_that_the_configuration_lacks() -> None:
    plain, compiled = (
        space("debug_model", 4, 8),
        space("debug_model", 4, 8, "--compile.enable=true"),
    )
    data = next(layout for layout in all_layouts(plain) if layout.name == "FSDP 4")
    tensor = next(layout for layout in all_layouts(plain) if layout.name == "TP 2 x FSDP 2")
    for of, layout, expected in (
        (plain, data, [set(), {"compiled"}]),
        (plain, tensor, [set(), {"compiled"}, {"compiled", "async TP"}]),
        (compiled, data, [set()]),
        (compiled, tensor, [set(), {"async TP"}]),
    ):
        kinds = [set(each.details.split(", ")) for each in with_faster_kernels(layout, of.config)]
        given = set(layout.details.split(", "))
        assert [kind - given for kind in kinds] == expected
    assert (
        settings_of(replace(tensor, compiles=True, async_tp=True), plain).items()
        >= {
            "compile.enable": True,
            "parallelism.enable_async_tensor_parallel": True,
        }.items()
    )


def test_float8_is_added_once_and_compiled() -> None:
    plain = space("debug_model", 4, 8)
    layout = next(each for each in all_layouts(plain) if each.name == "TP 2 x FSDP 2")
    float8 = with_float8(replace(layout, compiles=True, async_tp=True), plain.config)
    assert float8 == replace(layout, compiles=True, float8=True)
    config = apply(float8, plain)
    assert config.model.converters == ["quantize.linear.float8"] and config.compile.enable
    assert with_float8(layout, config) is None
    # Of a configuration that compiles, only float8 is new.
    compiled = space("debug_model", 4, 8, "--compile.enable=true")
    assert with_float8(layout, compiled.config) == replace(layout, float8=True)
