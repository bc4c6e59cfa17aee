"""Pipeline stages: their modules and ranks, and refused configurations."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchtitan_like.config.sections_scale import Parallelism
from torchtitan_like.distributed.schedule_view import order_of
from torchtitan_like.distributed.stages import (
    ModuleNames,
    check_explicit,
    micro_batch_problems,
    module_names,
    plan_stages,
    prune,
    split,
    stage_ids,
)
from torchtitan_like.models.spec import get_spec

SPEC = get_spec("llama3")
ARGS = dataclasses.replace(
    SPEC.flavors["debugmodel"],
    dim=8,
    n_layers=6,
    n_heads=2,
    n_kv_heads=1,
    vocab_size=8,
    max_seq_len=8,
)


def names(n_layers):
    return ModuleNames(("in",), tuple(f"b.{i}" for i in range(n_layers)), ("norm", "out"))


def section(pp=2, schedule="1F1B", **others):
    short = {
        "layers_per_stage": "pipeline_parallel_layers_per_stage", "microbatch_size": "pipeline_parallel_microbatch_size",
        "first": "pipeline_parallel_first_stage_less_layers", "last": "pipeline_parallel_last_stage_less_layers",
        "csv": "pipeline_parallel_schedule_csv", "fqns": "module_fqns_per_model_part",
    }  # fmt: skip
    return Parallelism(
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,
        **{short[key]: value for key, value in others.items()},
    )


# ---- split


@pytest.mark.parametrize(
    ("n_layers", "num_stages", "first", "last", "blocks"),
    [
        (6, 1, 1, 1, [6]),
        (6, 2, 1, 1, [3, 3]),
        (6, 4, 1, 1, [1, 2, 2, 1]),
        (6, 4, 0, 0, [2, 2, 1, 1]),
        (6, 8, 1, 1, [0, 1, 1, 1, 1, 1, 1, 0]),
        (7, 4, 0, 1, [2, 2, 2, 1]),
        (126, 16, 1, 1, [7, *[8] * 14, 7]),
    ],
)
def test_blocks_are_distributed_evenly(n_layers, num_stages, first, last, blocks):
    """As TorchTitan's generate_llm_fqn_per_model_part distributes them."""
    stages = split(names(n_layers), num_stages, first, last)
    assert [sum(fqn.startswith("b.") for fqn in stage) for stage in stages] == blocks
    assert sum(stages, ()) == names(n_layers).in_order()
    assert stages[0][0] == "in"
    assert stages[-1][-2:] == ("norm", "out")


@pytest.mark.parametrize(
    ("n_layers", "num_stages", "first", "last"), [(2, 5, 1, 1), (2, 4, 0, 0), (6, 4, 1, 3)]
)
def test_a_stage_without_a_module_is_refused(n_layers, num_stages, first, last):
    with pytest.raises(ValueError, match=f"{n_layers} layers .* for each of {num_stages} stages"):
        split(names(n_layers), num_stages, first, last)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["in", "b.0"], ["b.1", "norm", "out"]], None),
        ([["in"], ["b.0", "b.1", "norm"], ["out"]], None),
        ([["in", "b.0"], ["b.1", "nrom", "norm", "out"]], "'nrom' is no module of this model"),
        ([["in", "b.0"], ["b.0", "b.1", "norm", "out"]], "'b.0' occurs 2 times"),
        ([["in", "b.0"], ["norm", "out"]], "'b.1' is in no stage"),
        ([["in", "b.0", "b.1", "norm", "out"], []], "stage 1 is empty"),
        (
            [["in", "b.1"], ["b.0", "norm", "out"]],
            r"'b.1' comes before .* \(in, b.0, b.1, norm, out\)",
        ),
    ],
)
def test_explicit_names_must_list_each_module_once_in_order(stages, message):
    problems = check_explicit(names(2), stages)
    assert (message is None) == (problems == [])
    if message is not None:
        assert len(problems) == 1
        assert re.search(message, problems[0])


# ---- ranks


def test_stages_are_assigned_in_a_loop_or_a_v():
    assert [stage_ids(r, 4, 8, "Interleaved1F1B") for r in range(4)] == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]
    assert [stage_ids(r, 4, 8, "DualPipeV") for r in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [stage_ids(r, 2, 2, "GPipe") for r in range(2)] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (section(), ((0,), (1,))),
        (section(schedule="LoopedBFS"), ((0, 2), (1, 3))),
        (section(schedule="ZBVZeroBubble"), ((0, 3), (1, 2))),
        (section(layers_per_stage=4), ((0,), (1,))),
        (section(schedule="Interleaved1F1B", layers_per_stage=1), ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_number_of_stages_and_their_ranks(settings, ranks):
    plan = plan_stages(SPEC, ARGS, settings)
    assert plan.ranks == ranks
    assert plan.num_stages == sum(map(len, ranks)) == len(plan.fqns)
    assert plan.pp == 2
    assert sum(plan.fqns, ()) == module_names(SPEC, ARGS).in_order()


# ---- modules of a stage


def build():
    with torch.device("meta"):
        return SPEC.build(ARGS)


def test_a_stage_keeps_the_names_of_its_modules():
    plan = plan_stages(SPEC, ARGS, section(pp=3))
    whole = dict(build().named_parameters())
    kept = {}
    for stage, fqns in enumerate(plan.fqns):
        part = prune(build(), SPEC, fqns)
        assert (part.tok_embeddings is None) == (stage != 0)
        assert (part.norm is None) == (part.output is None) == (stage != 2)
        kept |= dict(part.named_parameters())
        assert [
            fqn for fqn in plan.fqns[stage] if dict(part.named_modules()).get(fqn) is None
        ] == []
    assert {name: p.shape for name, p in kept.items()} == {
        name: p.shape for name, p in whole.items()
    }


class Listed(nn.Module):
    """Blocks in a nested ModuleList. With `stray`, one parameter is outside all modules."""

    def __init__(self, *, stray):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.head = nn.Linear(2, 2)
        if stray:
            self.scale = nn.Parameter(torch.ones(2))


def listed_spec():
    return dataclasses.replace(
        SPEC,
        name="listed",
        block_pattern="body.blocks.*",
        first_modules=("embed",),
        last_modules=("head",),
    )


def test_a_module_list_keeps_its_names():
    part = prune(Listed(stray=False), listed_spec(), ["body.blocks.1", "body.blocks.3", "head"])
    assert {name.rpartition(".")[0] for name, _ in part.named_parameters()} == {
        "body.blocks.1", "body.blocks.3", "head",
    }  # fmt: skip


def test_a_parameter_outside_all_modules_is_refused():
    with pytest.raises(
        ValueError, match="scale: in none of the first, repeated and last modules of 'listed'"
    ):
        prune(Listed(stray=True), listed_spec(), ["embed", "body.blocks.0"])


# ---- refused configurations


def problems_of(settings, *, args=ARGS, local_batch_size=8, num_accumulated=1):
    plan = plan_stages(SPEC, args, settings)
    size = settings.pipeline_parallel_microbatch_size
    return [
        *plan.problems,
        *micro_batch_problems(
            plan, size, local_batch_size=local_batch_size, num_accumulated=num_accumulated
        ),
    ]


VALID = [
    section(),
    section(pp=8, schedule="GPipe", microbatch_size=8),
    section(pp=4, schedule="Interleaved1F1B"),
    section(schedule="DualPipeV"),
    section(
        fqns=[
            ["tok_embeddings", "layers.0"],
            [*(f"layers.{i}" for i in range(1, 6)), "norm", "output"],
        ]
    ),
]


@pytest.mark.parametrize("settings", VALID)
def test_valid_configurations_have_no_problem(settings):
    assert problems_of(settings) == []


HALVES = [
    ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
    ["layers.3", "layers.4", "layers.5", "norm", "output"],
]
INVALID = {
    "more stages than layers": (
        section(pp=9, schedule="GPipe"), {}, "degree", "enough layers for each stage; 6 layers .* of 9 stages"),
    "too many layers subtracted from the last stage": (section(pp=2, last=9), {}, "degree", ": 8 for each of 2 stages"),
    "stages not divisible by ranks": (
        section(pp=4, schedule="Interleaved1F1B", layers_per_stage=3), {}, "layers_per_stage",
        r"4 pipeline ranks divide; it is 3 = \(6 layers \+ 1 .*\) / 3, rounded up"),
    "two stages per rank with 1F1B": (
        section(layers_per_stage=2), {}, "layers_per_stage", "exactly 1 stages per rank with 1F1B; .* 2 on each"),
    "one stage per rank with LoopedBFS": (
        section(schedule="LoopedBFS", layers_per_stage=4), {}, "layers_per_stage",
        "at least 2 stages per rank with LoopedBFS; .* 1 on each"),
    "four stages per rank with DualPipeV": (
        section(schedule="DualPipeV", layers_per_stage=1), {}, "layers_per_stage", "exactly 2 stages per rank .* 4 on each"),
    "names for too many stages": (
        section(fqns=[["tok_embeddings"], HALVES[0][1:], HALVES[1]]), {}, "module_fqns", "2 pipeline ranks divide"),
    "a missing name": (section(fqns=[HALVES[0], HALVES[1][1:]]), {}, "module_fqns", "'layers.3' is in no stage"),
    "too few micro-batches for 1F1B": (
        section(pp=4, microbatch_size=4), {}, "microbatch_size", "2 are fewer than the 4 stages"),
    "too few micro-batches for DualPipeV": (
        section(schedule="DualPipeV", microbatch_size=4), {}, "microbatch_size", "2 are fewer than the 4 stages"),
    "uneven rounds": (
        section(schedule="Interleaved1F1B"), {"local_batch_size": 7}, "microbatch_size",
        "7 on 2 ranks are 3 rounds, which is no divisor"),
    "samples not divisible by micro-batch size": (
        section(microbatch_size=3), {}, "microbatch_size", "a divisor of training.local_batch_size = 8"),
    "tied weights": (
        section(), {"args": dataclasses.replace(ARGS, enable_weight_tying=True)}, "degree",
        "1 with this model: output.weight and tok_embeddings.weight are one tensor"),
    "no schedule file": (section(schedule="PipelineScheduleMulti"), {}, "schedule_csv", "the file with the schedule"),
    "a missing schedule file": (
        section(schedule="PipelineScheduleMulti", csv="/nowhere.csv"), {}, "schedule_csv", "No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_configurations_are_refused(name):
    settings, changes, key, message = INVALID[name]
    (problem,) = problems_of(settings, **changes)
    assert key in problem.key
    assert problem.key.startswith("parallelism.")
    assert re.search(message, problem.expected), problem.expected


def test_all_problems_are_reported_together():
    tied = dataclasses.replace(ARGS, enable_weight_tying=True)
    problems = problems_of(section(schedule="DualPipeV", microbatch_size=4), args=tied)
    assert [problem.key.rpartition("_")[2] for problem in problems] == ["degree", "size"]


def test_the_remedy_names_valid_numbers():
    (problem,) = problems_of(section(pp=4, schedule="Interleaved1F1B"), local_batch_size=9)
    assert problem.remedy.endswith("8 or 10")
    (problem,) = problems_of(section(pp=4, microbatch_size=4))
    assert problem.remedy.endswith("there are 4")


def test_accumulation_adds_micro_batches():
    assert problems_of(section(pp=4, microbatch_size=4), num_accumulated=2) == []


def test_a_model_without_a_number_of_layers_is_refused():
    spec = dataclasses.replace(SPEC, constraints=lambda args: {})
    (problem,) = plan_stages(spec, ARGS, section()).problems
    assert "does not state its number of layers" in problem.expected


def write_schedule(path, order):
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in order))
    return str(path)


@pytest.mark.parametrize(
    ("order", "others", "message"),
    [
        (order_of("1F1B", 2, 1, 8), {}, None),
        (
            order_of("1F1B", 2, 1, 4),
            {},
            "a schedule of the 8 micro-batches of a step; it has 4 micro-batches",
        ),
        (order_of("1F1B", 4, 1, 8), {}, "one line per pipeline rank: 2; it has 4"),
        (
            order_of("ZBVZeroBubble", 2, 2, 8),
            {},
            r"round robin, \(\(0, 2\), \(1, 3\)\); it has \(\(0, 3\), \(1, 2\)\)",
        ),
        (
            order_of("LoopedBFS", 2, 2, 8),
            {"fqns": HALVES},
            "as module_fqns_per_model_part has: 2; it has 4",
        ),
        (order_of("1F1B", 2, 1, 8)[::-1], {}, "round robin"),
        (
            [row[:-1] for row in order_of("1F1B", 2, 1, 8)],
            {},
            "do not occur once, forward and backward",
        ),
        (
            [row[::-1] for row in order_of("1F1B", 2, 1, 8)],
            {},
            "cannot be run: rank 0 at 0B7, rank 1 at 1B7",
        ),
    ],
)
def test_a_schedule_file_must_match_the_run(tmp_path, order, others, message):
    settings = section(
        schedule="PipelineScheduleMulti",
        csv=write_schedule(tmp_path / "schedule.csv", order),
        **others,
    )
    problems = problems_of(settings)
    assert (message is None) == (problems == [])
    if message is not None:
        assert re.search(message, problems[0].expected), problems[0].expected


def test_a_schedule_file_is_read_once(tmp_path):
    """A file that is edited while a run starts does not mix two schedules."""
    order = order_of("1F1B", 2, 1, 8)
    path = tmp_path / "schedule.csv"
    text = write_schedule(path, order)
    plan = plan_stages(SPEC, ARGS, section(schedule="PipelineScheduleMulti", csv=text))
    path.write_text("0F0,0I0,0W0")
    assert plan.order(8) == order and not plan.splits_backward
    assert micro_batch_problems(plan, 1, local_batch_size=8, num_accumulated=1) == []


def test_stages_needs_no_torch():
    code = "import sys, torchtitan_like.distributed.stages; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
