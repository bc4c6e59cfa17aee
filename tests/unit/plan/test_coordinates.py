"""The sizes of all modules' outputs do not depend on the width in muP, and do otherwise."""

from dataclasses import replace

import pytest

from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.models import parametrization
from torchtitan_like.plan import coordinates
from torchtitan_like.plan.coordinates import check_coordinates, main

WIDTHS, STEPS = (64, 128, 256, 512), 10
DENSE = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.args.n_heads": 8,
    "model.args.n_layers": 2,
    "model.args.multiple_of": 32,
    "model.base_args.dim": 64,
    "model.base_args.n_heads": 2,
    "optimizer.lr": 4e-4,
}
MOE = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    "model.args.n_heads": 8,
    "model.args.n_kv_heads": 8,
    "model.args.head_dim": 32,
    "model.args.n_layers": 2,
    "model.args.num_experts": 4,
    "model.args.top_k": 2,
    "model.args.moe_inter_dim": 256,
    "model.base_args.dim": 64,
    "model.base_args.n_heads": 2,
    "model.base_args.n_kv_heads": 2,
    "model.base_args.moe_inter_dim": 64,
    "optimizer.lr": 4e-4,
}
MODELS = {"dense": DENSE, "experts": MOE}
# Other families with experts.
SMALL = {
    "model.flavor": "debugmodel",
    "model.args.n_heads": 8,
    "model.args.n_layers": 2,
    "model.args.num_experts": 4,
    "model.args.top_k": 2,
    "model.base_args.dim": 64,
    "model.base_args.n_heads": 2,
    "optimizer.lr": 4e-4,
}
DEEPSEEK_V3 = {
    **SMALL,
    "model.name": "deepseek_v3",
    "model.args.inter_dim": 512,
    "model.args.kv_lora_rank": 64,
    "model.args.qk_nope_head_dim": 16,
    "model.args.qk_rope_head_dim": 16,
    "model.args.v_head_dim": 32,
    "model.args.rope_factor": 1.0,
    "model.base_args.inter_dim": 128,
    "model.base_args.moe_inter_dim": 64,
    "model.base_args.kv_lora_rank": 16,
}
LLAMA4 = {
    **SMALL,
    "model.name": "llama4",
    "model.args.n_kv_heads": 4,
    "model.args.multiple_of": 32,
    "model.args.interleave_moe_layer_step": 2,
    "model.base_args.n_kv_heads": 1,
}
GPT_OSS = {
    **SMALL,
    "model.name": "gpt_oss",
    "model.args.n_kv_heads": 8,
    "model.args.head_dim": 32,
    "model.args.moe_inter_dim": 256,
    "model.base_args.n_kv_heads": 2,
    "model.base_args.moe_inter_dim": 64,
}
# With the seeds that average out how much its routers differ from seed to seed.
OTHER_FAMILIES = {"deepseek_v3": (DEEPSEEK_V3, 4), "llama4": (LLAMA4, 4), "gpt_oss": (GPT_OSS, 24)}


def config(model, kind="mup", **changes):
    values = {**model, "model.parametrization": kind, **changes}
    return load_config([f"--{key}={value}" for key, value in values.items()])


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_all_outputs_are_flat_in_mup(model):
    rows = check_coordinates(config(model), WIDTHS, STEPS)
    assert [row for row in rows if not row.is_flat] == []
    modules = {row.module for row in rows}
    layer = "layers.1.feed_forward.w2" if model is DENSE else "layers.1.moe.router"
    assert {"tok_embeddings", layer, "layers.0.attention.wq", "norm", "output"} <= modules
    # Each module has a row at each step, except heads and routers at step 0.
    num_readouts = 1 + 2 * (model is MOE)
    assert len(rows) == (STEPS + 1) * len(modules) - num_readouts


@pytest.mark.nightly
@pytest.mark.parametrize("model, num_seeds", OTHER_FAMILIES.values(), ids=OTHER_FAMILIES)
def test_all_outputs_of_other_families_are_flat(model, num_seeds):
    rows = check_coordinates(config(model), WIDTHS, STEPS, num_seeds=num_seeds)
    assert [row for row in rows if not row.is_flat] == []


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_outputs_grow_in_the_standard_parametrization(model):
    rows = check_coordinates(config(model, "standard"), WIDTHS[:3], 3, num_seeds=1)
    growing = {row.module for row in rows if row.slope > 0.4}
    assert {"layers.0.attention.wq", "layers.1.attention.wo", "output"} <= growing


def test_outputs_grow_with_the_standard_learning_rates(monkeypatch):
    """The check finds wrong learning rates too, not only wrong initial weights."""
    original = parametrization.parametrize

    def with_standard_rates(*arguments):
        spec = original(*arguments)
        return replace(spec, scale=lambda name, ndim: spec.scale(name, ndim)._replace(lr=1.0))

    monkeypatch.setattr("torchtitan_like.check.model_checks.parametrize", with_standard_rates)
    rows = check_coordinates(config(DENSE), WIDTHS, 3, num_seeds=1)
    growing = {row.module for row in rows if row.step == 3 and row.slope > coordinates.TOLERANCE}
    assert {"layers.0.feed_forward.w2", "layers.1.attention.wo", "output"} <= growing


def test_a_tied_model_is_flat_in_completep():
    """Its token overlaps decay with the width: it is wide here."""
    tied = {**DENSE, "model.args.enable_weight_tying": "true", "model.base_args.n_layers": 1}
    rows = check_coordinates(config(tied, "completep"), (256, 512, 1024), 2, num_seeds=2)
    assert [row for row in rows if not row.is_flat] == []


def test_impossible_widths_are_refused():
    with pytest.raises(ValueError, match=r"width 80: n_heads = 8 would be 2\.5"):
        check_coordinates(config(DENSE), (64, 80), 1)
    with pytest.raises(ConfigError, match="dim"):
        check_coordinates(config(DENSE, **{"model.args.dim": 3}), (64, 80), 1)


def test_the_command_prints_slopes_and_writes_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = [f"--{key}={value}" for key, value in DENSE.items() if "base_args" not in key]
    argv = ["debug_model.toml", *settings, "--steps", "1"]
    assert main([*argv, "--widths", "64,128", "--seeds", "1"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "0.attention.wq" in line)
    slope = line.split()[1]
    assert slope.endswith("*") and float(slope[:-1]) == pytest.approx(0.5, abs=0.1)
    argv += ["--model.parametrization", "mup", "--widths", "64,512"]
    base = ["--model.base_args.dim", "64", "--model.base_args.n_heads", "2"]
    assert main([*argv, *base, "--csv", "sizes.csv"]) == 0
    *_, head, total = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["output", "-"]  # its change at step 0 is 0
    assert total == "0 of 53 slopes are beyond 0.1"
    header, first, *_ = (tmp_path / "sizes.csv").read_text().splitlines()
    assert header == "module,step,rms_64,rms_512,slope"
    assert float(first.removeprefix("tok_embeddings,0,").split(",")[0]) == pytest.approx(1, 0.05)
    assert main(argv) == 78
    assert "model.base_args" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"--widths {text}", "two different widths") for text in ("64", "64,64", "64,x", "0,64")),
        ("--seeds 0", "a seed or more"),
        ("--steps -1", "0 steps or more"),
    ],
)
def test_wrong_arguments_of_the_command_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["debug_model.toml", *words.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
