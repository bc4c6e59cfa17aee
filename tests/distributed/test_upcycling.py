"""Runs that start a mixture of experts from a dense checkpoint, on every layout."""

import json
import logging

import pytest

from tests.distributed.parity import build, options, release
from tests.distributed.test_matrix import REPLICATE, TP, pipeline
from tests.distributed.test_moe import EP, ETP
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.distributed.initialize import weight_hash
from torchtitan_like.util.exit_codes import ExitCode

SAVING = {"checkpoint.enable": "true", "training.local_batch_size": 4}
SIZES = {"model.name": "qwen3", "model.args.head_dim": 8, "model.args.enable_weight_tying": "false"}
DENSE = SIZES | {"model.flavor": "debugmodel", "model.args.hidden_dim": 12}
EXPERTS = SIZES | {
    "model.flavor": "debugmodel_moe",
    "model.args.num_experts": 4,
    "model.args.top_k": 2,
    "model.args.moe_inter_dim": 12,
    "checkpoint.initial_load_upcycle": "true",
}
SINGLE = {"training.local_batch_size": 8}
EVERY_RUN = {
    "one-rank": (1, {}),
    "ep": (2, {EP: 2}),
}
NIGHTLY = {
    "pp-fsdp": (4, pipeline("1F1B")),
    "ep-etp": (4, {EP: 2, TP: 2, ETP: 2}),
    "fsdp": (2, {}),
    "hsdp-ep": (4, {EP: 2, REPLICATE: 2, "training.local_batch_size": 2}),
    "ep-fsdp": (4, {EP: 2, "training.local_batch_size": 2}),
    "ep-tp": (2, {EP: 2, TP: 2}),
    "ep-pp": (4, pipeline("1F1B", **{EP: 2})),
}


def run_options(folder, overrides):
    argv = options(str(folder), "float32", **{**SAVING, "training.steps": 2, **overrides})
    multiple_of = argv.index("--model.args.multiple_of")  # of Llama 3
    return argv[:multiple_of] + argv[multiple_of + 2 :]


def train(argv):
    trainer = build(argv)
    code = trainer.train()
    release(trainer)
    return code


def hash_at_start(argv):
    """Return the hash of the weights before the first step, and the rank's log lines."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logging.getLogger().level
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    try:
        trainer = build(argv)
    except CheckpointError as error:
        return str(error), lines
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)
    shares = trainer.world.step_group.gather_objects(sum(map(weight_hash, trainer.parts)))
    release(trainer)
    return sum(shares) % 2**64, lines


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The weights of a dense run, as a native step of 2 ranks and as safetensors."""
    folder = tmp_path_factory.mktemp("dense")
    for name, overrides in {"native": {}, "hf": {"checkpoint.last_save_in_hf": "true"}}.items():
        argv = run_options(folder / name, DENSE | overrides)
        assert run_ranks(train, 2, argv) == [ExitCode.DONE] * 2
    return {name: folder / name / "checkpoint/step-2" for name in ("native", "hf")}


@pytest.fixture(scope="module")
def one_rank(sources):
    """The hash of the upcycled weights on one rank."""
    argv = run_options(
        sources["native"].parents[2] / "one",
        EXPERTS | SINGLE | {"checkpoint.initial_load_path": sources["native"]},
    )
    return run_ranks(hash_at_start, 1, argv)[0][0]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(*cell, id=name) for name, cell in EVERY_RUN.items()]
    + [pytest.param(*cell, id=name, marks=pytest.mark.nightly) for name, cell in NIGHTLY.items()],
)
def test_every_layout_and_source_starts_with_the_weights_of_one_rank(
    tmp_path, sources, one_rank, ranks, layout
):
    for name, path in sources.items():
        changes = {**EXPERTS, **layout, "checkpoint.initial_load_path": path}
        if ranks == 1:
            changes |= SINGLE
        results = run_ranks(hash_at_start, ranks, run_options(tmp_path / name, changes))
        assert [value for value, _ in results] == [one_rank] * ranks
        lines = results[0][1]
        assert (
            f"Upcycled {path}: 6 feed-forward tensors copied to each of 4 experts, "
            "19 other tensors loaded unchanged, routers of 2 layers initialized anew"
        ) in lines
        assert f"from {path} (upcycled) and seed 42, hash {one_rank:016x}" in " ".join(lines)


def test_a_resumed_run_does_not_upcycle_again(tmp_path, sources):
    """Its manifests name the dense checkpoint."""
    changes = {
        **EXPERTS,
        EP: 2,
        "checkpoint.initial_load_path": sources["native"],
        "checkpoint.last_save_model_only": "false",
    }
    argv = run_options(tmp_path / "run", changes)
    assert run_ranks(train, 2, argv) == [ExitCode.DONE] * 2
    first, _ = run_ranks(hash_at_start, 2, argv)[0]
    longer = {**changes, "training.steps": 3, "lr_scheduler.total_steps": 2}
    resumed, lines = run_ranks(hash_at_start, 2, run_options(tmp_path / "run", longer))[0]
    assert not any("pcycled" in line for line in lines) and resumed == first
    assert run_ranks(train, 2, run_options(tmp_path / "run", longer)) == [ExitCode.DONE] * 2
    for step in (2, 3):
        manifest = json.loads((tmp_path / f"run/checkpoint/step-{step}/manifest.json").read_text())
        assert manifest["upcycled_from"] == str(sources["native"])


def test_a_dense_step_of_other_sizes_is_refused_on_every_rank(tmp_path, sources):
    changes = {
        **EXPERTS,
        EP: 2,
        "model.args.moe_inter_dim": 24,
        "checkpoint.initial_load_path": sources["native"],
    }
    for error, _ in run_ranks(hash_at_start, 2, run_options(tmp_path / "run", changes)):
        assert "moe_inter_dim = 12 (this run: 24)" in error
