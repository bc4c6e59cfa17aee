"""Pipeline stages with additional stage tensors give the results of one rank."""

import functools

import pytest

from tests.distributed.parity import compare, run_cell
from tests.distributed.test_outside_model import LESS, PP, TP, options_of
from tests.harness.rank_pool import RankError, run_in_new_processes, run_ranks
from torchtitan_like.distributed.pipeline import _Stage
from torchtitan_like.models import StageTensor, get_spec

SCHEDULE = "parallelism.pipeline_parallel_schedule"
PER_STAGE = {"parallelism.pipeline_parallel_layers_per_stage": 1}
FQNS = "parallelism.module_fqns_per_model_part"
MODEL = {
    "experimental.custom_import": "tests.distributed.carrying_model",
    "model.name": "carrying",
    "model.flavor": "tiny",
    "model.args.n_layers": 4,
    "validation.enable": "true",
    "validation.dataset": "shakespeare_validation",
    "validation.freq": 2,
    "validation.steps": 1,
    "validation.seq_len": 32,
    "validation.local_batch_size": 4,
}
ONLY_GRADIENTS = {"model.args.without_gradient": "false"}
BFLOAT16 = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
AC = {"activation_checkpoint.mode": "full"}
LAYOUTS = {
    # name: (ranks, overrides); the global batch always has 8 samples
    "1f1b": (2, {SCHEDULE: "1F1B", **LESS}),
    "interleaved": (2, {SCHEDULE: "Interleaved1F1B", **PER_STAGE, **LESS, **AC}),
    "zero-bubble": (2, {SCHEDULE: "InterleavedZeroBubble", **PER_STAGE, **LESS}),
    "v": (2, {SCHEDULE: "ZBVZeroBubble", **LESS}),
    "dualpipe-v-on-four-ranks": (4, {SCHEDULE: "DualPipeV", "model.args.n_layers": 8, **LESS}),
    "embedding-stage": (
        2,
        {SCHEDULE: "1F1B", FQNS: '[["wte"],["h.0","h.1","h.2","h.3","ln_f","lm_head"]]'},
    ),
    "fsdp": (4, {SCHEDULE: "InterleavedZeroBubble", "training.local_batch_size": 4, **LESS}),
    "tensor-parallel": (4, {SCHEDULE: "1F1B", TP: 2, **LESS, **ONLY_GRADIENTS}),
}
NIGHTLY = ("dualpipe-v-on-four-ranks", "embedding-stage", "fsdp", "tensor-parallel")


def build_argv(folder, **overrides):
    return options_of("outside", str(folder), "float64", **{**MODEL, **overrides})


@functools.cache
def one_rank(folder, **overrides):
    return run_ranks(
        run_cell, 1, build_argv(folder / "-".join(["one-rank", *overrides]), **overrides)
    )[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stages")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in LAYOUTS
    ],
)
def test_equals_one_rank(folder, layout):
    world_size, overrides = LAYOUTS[layout]
    sizes = {key: value for key, value in overrides.items() if key.startswith("model.args.")}
    expected = one_rank(folder, **sizes)
    pp = 2 if layout in ("fsdp", "tensor-parallel") else world_size
    argv = build_argv(folder / layout, **{PP: pp, **overrides})
    compare(expected, run_ranks(run_cell, world_size, argv)[0], "float64")


@pytest.mark.nightly
def test_stage_tensors_keep_their_dtype(folder):
    """FSDP2 must not cast the float64 stage tensor to its compute dtype bfloat16."""
    argv = build_argv(folder / "narrow", **LAYOUTS["fsdp"][1], **{PP: 2, **BFLOAT16})
    assert len(run_ranks(run_cell, 4, argv)[0].loss) == 3


def run_with_wrong_output(argv, kind):
    """Run with stages whose outputs differ from the model's declaration."""
    check = _Stage._check_outputs
    _Stage._check_outputs = lambda stage, outputs: check(stage, WRONG[kind][0](outputs))
    run_cell(argv)


WRONG = {
    "missing tensor": (lambda outputs: outputs[:-1], r"returned 5 values .* Expected 6 tensors"),
    "no tensor": (lambda outputs: (*outputs[:-1], 3), r"returned 6 values .*int\)"),
    "wrong shape": (
        lambda outputs: (*outputs[:-1], outputs[-1][:, 1:]),
        r"stage 0 returned ids as \(1, 31\), torch.int64. The next stage expects \(1, 32\)",
    ),
    "undeclared gradient": (
        lambda outputs: (*outputs[:4], outputs[0].sum((1, 2)), outputs[-1]),
        r"returned squares with a gradient",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_stage_output_is_rejected(folder, kind):
    argv = build_argv(folder / kind.replace(" ", "-"), **{PP: 2}, **LAYOUTS["1f1b"][1])
    with pytest.raises(RankError, match=WRONG[kind][1]):
        run_in_new_processes(run_with_wrong_output, 2, argv, kind)


def test_invalid_stage_tensor_declaration_is_rejected():
    with pytest.raises(ValueError, match="Only floating-point tensors have gradients"):
        StageTensor("ids", ("batch", "seq"), dtype="int64")
    with pytest.raises(ValueError, match=r"unknown sizes \['rows'\]"):
        StageTensor("x", ("rows",))
    assert get_spec("llama3").stage_tensors(None) == ()
