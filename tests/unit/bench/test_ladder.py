"""`titan ladder`: the shapes of the rungs, their settings, and what happens around the runs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.report.run_folder import step_row, write_rows
from torchtitan_like import cli
from torchtitan_like.bench import execution, ladder, results, scaling_law
from torchtitan_like.bench.ladder_report import Point, find
from torchtitan_like.bench.rungs import Rung, list_rungs
from torchtitan_like.check import load_for_command
from torchtitan_like.check.model_checks import check_model
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.loader import load_config
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.plan_file import PlanFile
from torchtitan_like.util.run_directory import RunEnd, write_exit

# ---- the rungs


def load(name: str, *settings: str, ranks: int = 1) -> JobConfig:
    config, _ = load_for_command(
        ["--job.config_file", f"{name}.toml", *settings], ranks, training=False
    )
    return config


def rungs_of(
    config: JobConfig,
    number: int = 4,
    factor: float = 2.0,
    ratios: Sequence[float] = (20.0,),
    ranks: int = 1,
) -> tuple[list[Rung], list[Rung]]:
    return list_rungs(config, ranks, number, factor, ratios)


def sizes_of(rung: Rung, prefix: str = "model.args.") -> dict[str, int]:
    """Return the settings of the model's arguments, by their short names."""
    return {
        key.removeprefix(prefix): int(value)
        for key, value in rung.settings.items()
        if key.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        # The feed-forward width stays 3 x dim and 3.5 x dim, because multiple_of shrinks.
        ("debug_model", {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 64},
         {"dim": 192, "n_layers": 5, "n_heads": 12, "multiple_of": 192}),
        ("llama3_8b", {"dim": 1280, "n_layers": 8, "n_heads": 10, "n_kv_heads": 2, "multiple_of": 320},
         {"dim": 3072, "n_layers": 26, "n_heads": 24, "n_kv_heads": 6, "multiple_of": 768}),
        ("qwen3_moe_debug",
         {"dim": 96, "n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "hidden_dim": 1152, "moe_inter_dim": 288},
         {"dim": 192, "n_layers": 7, "n_heads": 12, "n_kv_heads": 6, "hidden_dim": 2304, "moe_inter_dim": 576}),
        ("deepseek_v3_debug",
         {"dim": 96, "n_layers": 2, "n_dense_layers": 1, "n_heads": 6, "inter_dim": 384, "moe_inter_dim": 96,
          "kv_lora_rank": 192},
         {"dim": 192, "n_layers": 5, "n_dense_layers": 1, "n_heads": 12, "inter_dim": 768, "moe_inter_dim": 192,
          "kv_lora_rank": 384}),
    ],
)  # fmt: skip
def test_shapes_of_families(name: str, first: dict[str, int], last: dict[str, int]) -> None:
    rungs, _ = rungs_of(load(name))
    assert sizes_of(rungs[0]) == first
    assert sizes_of(rungs[-1]) == last


@pytest.mark.parametrize(
    "name", ["debug_model", "llama3_8b", "qwen3_0.6b", "qwen3_moe_debug", "qwen3_30b_a3b",
             "deepseek_v3_debug", "deepseek_v3_16b", "gpt_oss_debug", "llama4_debug"],
)  # fmt: skip
@pytest.mark.parametrize(("number", "factor"), [(4, 2.0), (6, 1.5)])
def test_rungs_have_the_wanted_parameters_and_the_targets_proportions(
    name: str, number: int, factor: float
) -> None:
    ranks = 8 if name in ("qwen3_30b_a3b", "deepseek_v3_16b") else 1  # of its experts
    config = load(name, ranks=ranks)
    target = check_model(config)
    rungs, (last,) = rungs_of(config, number, factor, ranks=ranks)
    assert last.settings.keys().isdisjoint({"model.args.dim"}) and last.num_params > 0
    for rung in rungs:
        wanted = last.num_params / factor ** (number + 1 - rung.number)
        assert abs(math.log(rung.num_params / wanted)) < 0.5 * math.log(factor)
        words = [f"--{key}={value}" for key, value in rung.settings.items()]
        model = check_model(load(name, *words, ranks=ranks))
        assert model.spec is not None and model.spec.num_params(model.args) == rung.num_params
        assert model.args.head_dim == target.args.head_dim
        assert model.args.vocab_size == target.args.vocab_size
    for before, after in pairwise([*rungs, last]):
        assert before.num_params < after.num_params


def test_mup_changes_only_the_width_and_keeps_the_base_model() -> None:
    words = [
        "--model.parametrization=mup",
        "--model.base_args.dim=64",
        "--model.base_args.n_heads=4",
    ]
    config = load("debug_model", *words)
    rungs, _ = rungs_of(config)
    for rung in rungs:
        assert sizes_of(rung)["n_layers"] == 6
        # Without it, the base would have the rung's own width of the feed-forward network.
        assert sizes_of(rung, "model.base_args.") == {"n_layers": 6, "multiple_of": 256}
    changes = [f"--{key}={value}" for key, value in rungs[0].settings.items()]
    assert not check_model(load("debug_model", *words, *changes)).problems

    config = load("debug_model", "--model.parametrization=completep", *words[1:])
    assert [sizes_of(rung)["n_layers"] for rung in rungs_of(config)[0]] == [2, 2, 4, 5]


def test_shapes_fit_the_layout() -> None:
    tp = "--parallelism.tensor_parallel_degree=4"
    rungs, _ = rungs_of(load("debug_model", tp, ranks=4), ranks=4)
    assert [sizes_of(rung)["n_heads"] for rung in rungs] == [4, 8, 8, 12]


def test_steps_and_warmup_follow_from_the_parameters() -> None:
    words = [
        "--training.steps=400",
        "--lr_scheduler.total_steps=800",
        "--training.global_batch_size=8",
    ]
    rungs, targets = rungs_of(load("debug_model", *words), ratios=(5.0, 10.0))
    assert [rung.name for rung in rungs[:2]] == ["rung-1-x5", "rung-1-x10"]
    assert [rung.name for rung in targets] == ["target-x5", "target-x10"]
    batch = 8 * 256
    for rung in [*rungs, *targets]:
        assert rung.steps == math.ceil(rung.ratio * rung.num_params / batch)
        assert rung.tokens == rung.steps * batch
        assert rung.settings["training.steps"] == str(rung.steps)
        assert rung.settings["validation.reference_curve"] == "None"
        assert rung.settings["lr_scheduler.warmup_steps"] == str(round(20 * rung.steps / 400))
        assert rung.settings["lr_scheduler.total_steps"] == str(2 * rung.steps)
    model = check_model(load("debug_model"))
    assert model.spec is not None
    flops = model.spec.flops_per_token(model.args, 256)
    assert targets[0].flops == flops * targets[0].tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.batch_ramp=[4, 4, 64]", "--training.global_batch_size=8"], "training.batch_ramp"),
        (["--checkpoint.initial_load_path=outputs"], "no checkpoint to start from"),
    ],
)  # fmt: skip
def test_settings_that_a_ladder_cannot_have(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rungs_of(load("debug_model", *words))


# ---- the command

TINY = [
    "debug_model.toml", "--model.args.dim", "128", "--model.args.n_heads", "16", "--model.args.n_layers", "4",
    "--training.seq_len", "64", "--validation.seq_len", "64", "--tokens-per-param", "0.5",
]  # fmt: skip
Launch = Callable[..., int]


@pytest.fixture(autouse=True)
def fast_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit fewer samples, and write no page: tests of the bench do."""

    def require_bokeh() -> None:
        raise ValueError("no page")

    monkeypatch.setattr(scaling_law, "NUM_SAMPLES", 100)
    monkeypatch.setattr(results, "require_bokeh", require_bokeh)


def law(num_params: int) -> float:
    return 2.0 + 300.0 / num_params**0.4


def launch_with_law(codes: dict[str, int], started: list[str]) -> Launch:
    """A launcher that loads the TOML file of a rung, and ends with a code and the loss of `law`."""

    def launch(_options: object, argv: Sequence[str], _words: object) -> int:
        config = load_config(argv)
        model = check_model(config)
        assert model.spec is not None
        folder = Path(config.job.dump_folder)
        started.append(folder.name)
        code = ExitCode(codes.get(folder.name, 0))
        loss = law(model.spec.num_params(model.args))
        steps = config.training.steps
        write_rows(folder / "metrics.jsonl", [step_row(steps, 10.0, loss=2 * loss)])
        validation = {"step": steps, "n_tokens_seen": 1, "loss": loss, "seconds": 1.0, "time": 11.0}
        write_rows(folder / "validation.jsonl", [validation])
        write_exit(folder, RunEnd(code.reason, int(code), steps))
        return int(code)

    return launch


def test_a_ladder_continues_and_predicts_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    codes = {"rung-2,seed=42": ExitCode.INTERRUPTED}
    monkeypatch.setattr(execution, "launch", launch_with_law(codes, started))
    words = [
        "ladder",
        *TINY,
        "--job.dump_folder",
        str(tmp_path),
        "--svg",
        str(tmp_path / "law.svg"),
    ]
    assert cli.main(words) == ExitCode.INTERRUPTED
    assert started == ["rung-1,seed=42", "rung-2,seed=42"]
    assert not (tmp_path / "ladder.csv").exists()
    assert {path.name for path in tmp_path.glob("*.toml")} == {
        *(f"rung-{number}.toml" for number in range(1, 6)), "target.toml"
    }  # fmt: skip

    started.clear()
    codes.clear()
    capsys.readouterr()
    assert cli.main(words) == 0
    assert started == [f"rung-{number},seed=42" for number in range(2, 6)]
    output = capsys.readouterr().out
    assert "1 of 5 runs are done already" in output
    assert "Law: L = 2.0000 + 300 / N^0.400, for N parameters; its" in output
    assert "rung-5 from the smaller rungs: predicted" in output
    assert "Loss: last validation loss of shakespeare_validation" in output

    with (tmp_path / "ladder.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rung"] for row in rows] == ["1", "2", "3", "4", "5"]
    for row in rows:
        assert float(row["law_loss"]) == pytest.approx(law(int(row["params"])))
        assert float(row["fitted_loss"]) == pytest.approx(law(int(row["params"])), rel=1e-4)
        assert int(row["planned_tokens"]) >= 0.5 * int(row["params"])
    content = json.loads((tmp_path / "ladder.json").read_text())
    (held_out,) = content["held_out"]
    assert held_out["rung"] == "rung-5" and abs(held_out["relative_error"]) < 1e-4
    (predicted,) = content["predictions"]
    assert predicted["loss"] == pytest.approx(law(predicted["params"]), rel=1e-4)
    assert predicted["low"] <= predicted["loss"] <= predicted["high"]
    assert "tokens per parameter" in (tmp_path / "law.svg").read_text()


def test_a_failed_rung_is_left_out_of_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {f"rung-{number},seed=42": ExitCode.BAD_NUMBERS for number in (1, 5)}
    monkeypatch.setattr(execution, "launch", launch_with_law(codes, []))
    words = ["ladder", *TINY, "--job.dump_folder", str(tmp_path)]
    assert cli.main(words) == ExitCode.BAD_NUMBERS
    output = capsys.readouterr().out
    assert "Law: L = 2.0000" in output and "from the smaller rungs" not in output
    codes["rung-2,seed=42"] = ExitCode.BAD_NUMBERS
    write_exit(tmp_path / "rung-2,seed=42", RunEnd("bad_numbers", 70, 1))
    assert cli.main([*words, "--collect"]) == ExitCode.BAD_NUMBERS
    assert "No law: 2 rungs have trained all their tokens" in capsys.readouterr().out


def test_a_rung_whose_data_ended_is_left_out_of_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execution, "launch", launch_with_law({}, []))
    words = ["ladder", *TINY, "--job.dump_folder", str(tmp_path)]
    assert cli.main(words) == 0
    write_exit(tmp_path / "rung-5,seed=42", RunEnd("done", 0, 1))
    capsys.readouterr()
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    assert "1 of 1 done, its data ended at step 1 of " in output
    assert "Law: L = 2.0000" in output and "from the smaller rungs" not in output


def test_repeats_of_a_rung_are_one_point() -> None:
    """They share the error of the law at their rung: as points, they would narrow the band."""
    rungs, targets = rungs_of(load("debug_model"), number=5)
    points = [
        Point(rung, law(rung.num_params) + change)
        for rung in rungs
        for change in (-0.01, 0.0, 0.01)
    ]
    fitted = find("loss", points, rungs, targets).law
    assert fitted is not None and fitted.degrees == 5 - 3
    assert fitted.errors == pytest.approx(0.0, abs=1e-4)


def test_tasks_of_an_array_and_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(execution, "launch", launch_with_law({}, started))
    words = ["ladder", *TINY, "--rungs", "3", "--tokens-per-param", "0.5,1", "--repeat", "2"]
    words += ["--job.dump_folder", str(tmp_path), "--validation.enable", "false"]
    assert cli.main([*words, "--dry-run"]) == 0 and not started
    assert {path.suffix for path in tmp_path.iterdir()} == {".toml"}
    for index in ("0", "11"):
        assert cli.main([*words, "--array-index", index]) == 0
    assert started == ["rung-1-x0.5,seed=42", "rung-3-x1,seed=43"]
    assert not (tmp_path / "ladder.csv").exists()
    capsys.readouterr()
    assert cli.main(words) == 0 and len(started) == 12
    output = capsys.readouterr().out
    assert "Loss: training loss, mean of the last rows" in output
    assert "/ D^" in output and "for N parameters and D tokens" in output
    assert "target-x0.5 with" in output and "target-x1 with" in output


def plan_with(gib: dict[int, float]) -> Callable[..., PlanFile]:
    """Return a planner that gives models with these numbers of layers so much memory."""

    def plan(config: JobConfig, _num_ranks: int, gpu: object) -> PlanFile:
        fullest = gib.get(config.model.args["n_layers"], 1.0)
        return PlanFile({}, "h100-80g", "typical", 1.0, 1.0, fullest, 3.6, 10.0, {})

    return plan


def test_a_rung_that_does_not_fit_is_refused_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(execution, "launch", launch_with_law({}, started))
    monkeypatch.setattr(execution, "plan_of_run", plan_with({3: 100.0}))
    monkeypatch.setattr(ladder, "find_remedies", lambda *_: [])
    folder = tmp_path / "ladder"
    words = ["ladder", *TINY, "--plan", "h100-80g", "--job.dump_folder", str(folder)]
    assert cli.main(words) == ExitCode.BAD_CONFIG
    message = capsys.readouterr().err
    assert "rung-5 needs 107,374,182,400 bytes of the 84,932,978,278 bytes" in message
    assert "use more ranks" in message and not folder.exists() and not started

    monkeypatch.setattr(execution, "plan_of_run", plan_with({4: 100.0}))  # the target
    assert cli.main([*words, "--dry-run"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[-7:]
    assert head.split()[-4:] == ["GiB", "step,", "s", "GPU-hours"]
    steps = int(lines[0].split()[-5].replace(",", ""))
    assert lines[0].split()[-3:] == ["1.00", "3.6", f"{steps / 1000:.3g}"]
    assert lines[-1].split()[-3] == "100.00"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--rungs", "3"], 2, "Expected at least 4 rungs: add some"),
        (["--rungs", "2", "--tokens-per-param", "1,2,3"], 2, "Expected at least 3 rungs"),
        (["--rungs", "12"], 2, "--rungs 12: only 6 models with heads of the same size"),
        (["--tokens-per-param", "10,many"], 2, "it is 'many'. Expected a number above 0"),
        (["--tokens-per-param", "-1"], 2, "it is '-1'. Expected a number above 0"),
        (["--factor", "1"], 2, "Expected a number above 1"),
        (["--svg", "law.doc"], 2, "law.doc is no name of a picture"),
        (["--array-index", "5"], 2, "expected an index of the 5 runs"),
        (["--training.stesp", "1"], 78, "training.stesp"),
        (["--model.args.dimm", "1"], 78, "dimm = 1: llama3 has no such argument"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[str] = []
    monkeypatch.setattr(execution, "launch", launch_with_law({}, started))
    folder = tmp_path / "ladder"
    arguments = ["ladder", *TINY, *words, "--job.dump_folder", str(folder)]
    try:
        assert cli.main(arguments) == code
    except SystemExit as error:
        assert error.code == code
    assert message in capsys.readouterr().err and not folder.exists() and not started
