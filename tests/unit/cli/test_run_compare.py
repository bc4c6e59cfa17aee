"""`titan run compare`: the first step at which two runs differ, and their environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_like.cli import main as titan
from torchtitan_like.monitor.attempt import write_environment


def main(arguments: list[str]) -> int:
    return titan(["run", "compare", *arguments])


def write(folder: Path, num_steps: int, **changed: dict[int, Any]) -> str:
    """Write a run. All runs are equal, except for ``changed``: key -> step -> value."""
    folder.mkdir()
    rows = []
    for step in range(1, num_steps + 1):
        row = {
            "step": step,
            "n_tokens_seen": 8 * step,
            "num_valid_tokens": 7,
            "lr": 1e-3,
            "skipped": False,
            "data_digest": f"{step:016x}",
            "data_digest_chain": f"{step * 3:016x}",
            "loss": 4.0 / step,
            "grad_norm": 1.0,
        }
        rows.append(row | {key: values[step] for key, values in changed.items() if step in values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_equal_runs_return_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "a", 5), write(tmp_path / "b", 7)]) == 0
    output = capsys.readouterr().out
    assert (
        "5 steps in both, 1 to 5" in output
        and "2 steps only in B" in output
        and "differs" not in output
    )
    assert "max_loss           in no step of both" in output


def test_the_first_difference_of_each_key_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"data_digest": {4: "ff", 5: "fe"}, "loss": {3: 4.0 / 3 * 1.5, 5: 0.8 * 1.25}}
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5, **changed)]
    assert main(runs) == 1
    lines = {
        line.split()[0]: line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    }
    assert "differs from step 4 on: 0000000000000004 and ff" in lines["data_digest"]
    assert "differs from step 3 on: " in lines["loss"] and lines["loss"].endswith(
        "largest relative difference 5.00e-01"
    )
    assert lines["grad_norm"].endswith("equal")
    assert main([*runs, "--data-only"]) == 1
    assert "loss" not in capsys.readouterr().out.replace("max_loss", "")


@pytest.mark.parametrize("key", ["loss", "max_loss", "grad_norm", "step"])
def test_a_value_that_is_not_a_number_is_named(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5, **{key: {3: "many"}})]
    assert main(runs) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{runs[1]}: metrics.jsonl: skipped 1 of 5 lines ({key} is not a")


def test_a_missing_loss_of_one_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step without labels has no loss."""
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5, loss={2: None})]
    assert main(runs) == 1
    assert "relative difference inf" in capsys.readouterr().out


def test_data_only_ignores_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5, loss={2: float("nan")})]
    assert main([*runs, "--data-only"]) == 0
    assert main(runs) == 1
    assert "differs from step 2 on: 2.0 and nan" in capsys.readouterr().out
    assert main([runs[1], runs[1]]) == 0


def test_equal_nan_values_hide_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    runs = [
        write(tmp_path / "a", 5, loss={1: nan}),
        write(tmp_path / "b", 5, loss={1: nan, 4: 1.5}),
    ]
    assert main(runs) == 1
    assert (
        "differs from step 4 on: 1.0 and 1.5; largest relative difference 5.00e-01"
        in capsys.readouterr().out
    )
    runs.append(write(tmp_path / "c", 5, loss={1: nan, 4: 1.5, 5: nan}))
    assert main([runs[0], runs[2]]) == 1
    assert "largest relative difference inf" in capsys.readouterr().out


def test_a_half_written_last_row_is_ignored(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 5)]
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert main(runs) == 0


def test_runs_without_common_steps_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "a", 5), str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert main([str(tmp_path / "empty"), str(tmp_path / "a")]) == 2
    assert "has no step" in capsys.readouterr().err
    late = write(tmp_path / "late", 1, step={1: 9})
    assert main([late, str(tmp_path / "a")]) == 2
    assert "no step is in both runs: A has 9 to 9, B has 1 to 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", "not a JSON object"),
        ("[1, 2]", "not a JSON object"),
        ("7", "not a JSON object"),
        ('{"loss": 1.0}', "no step"),
    ],
)
def test_damaged_metrics_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    runs = [write(tmp_path / "a", 2), write(tmp_path / "b", 2)]
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert main(runs) == 2
    assert (
        f"{runs[1]}: metrics.jsonl: skipped 1 of 3 lines ({message}): line 3"
        in capsys.readouterr().err
    )


def test_missing_keys_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another trainer may log only step and loss."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b/metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n')
    assert main([write(tmp_path / "a", 2), str(tmp_path / "b")]) == 0
    output = capsys.readouterr().out
    assert (
        "  loss               equal" in output
        and "  lr                 in no step of both" in output
    )


def test_json_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / "a", 5), write(tmp_path / "b", 4, loss={2: float("nan")})]
    assert main([*runs, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["equal"], content["num_steps"], content["only_in_a"]) == (False, 4, 1)
    assert content["keys"]["loss"] == {
        "equal": False, "num_rows": 4, "first_step": 2, "a": 2.0, "b": "nan",
        "largest_relative_difference": "inf",
    }  # fmt: skip
    assert content["keys"]["lr"]["equal"] is True


# ---- environments


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs. Attempt 2 of B equals A; attempt 10 preloads a library and has one more package."""
    folder = tmp_path_factory.mktemp("runs")
    same = {
        "PATH": "/bin",
        "HF_TOKEN": "hf_a",
    }
    other = {**same, "LD_PRELOAD": "/lib/libjemalloc.so=2", "HF_TOKEN": "hf_b", "MINE": "1"}
    for name, variables in (
        ("a/attempts/1", same),
        ("b/attempts/2", same),
        ("b/attempts/10", other),
    ):
        write_environment(
            folder / name / "environment", variables, ["train", "--training.steps", "7"]
        )
    packages = folder / "b/attempts/10/environment/packages.txt"
    packages.write_text(packages.read_text().replace("torch==", "torch==9+") + "mine==1\n")
    (folder / "b/attempts/10/environment/uncommitted.diff").write_text("+ a line\n")
    return folder


def test_equal_environments_return_0(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "a"), str(runs / "b/attempts/2"), "--environment"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert {
        "variables.txt: equal",
        "packages.txt: equal",
        "facts.json: equal",
        "git.txt: equal",
    } <= set(output)


def test_the_time_is_not_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "a/attempts/1/environment/facts.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "time": "2001-01-01"}))
    assert main([str(runs / "a"), str(runs / "b/attempts/2"), "--environment"]) == 0
    file.write_text(json.dumps({**facts, "torch": "1.0"}))
    assert main([str(runs / "a"), str(runs / "b/attempts/2"), "--environment"]) == 1
    file.write_text(json.dumps(facts))
    output = capsys.readouterr().out
    assert "facts.json: 1 differences\n  torch\n    A 1.0\n    B " in output


def test_environments_of_the_newest_attempts_are_compared(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(runs / "a"), str(runs / "b"), "--environment"]) == 1
    output = capsys.readouterr().out
    assert f"B: {runs}/b/attempts/10/environment" in output
    assert "variables.txt: 2 differences\n" in output
    assert "  MINE\n    A (none)\n    B <not recorded>\n" in output
    assert "  LD_PRELOAD\n    A (none)\n    B /lib/libjemalloc.so=2\n" in output
    assert "  mine\n    A (none)\n    B 1\n" in output and "    B 9+" in output
    assert "  hash of uncommitted.diff\n" in output


def test_a_folder_without_environment_is_refused(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(runs / "a"), str(tmp_path), "--environment"]) == 2
    assert f"{tmp_path} contains no environment" in capsys.readouterr().err


def test_json_of_environments(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(runs / "a"), str(runs / "b"), "--environment", "--json"]
    assert main(arguments) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["equal"] is False
    assert content["files"]["variables.txt"]["LD_PRELOAD"] == [None, "/lib/libjemalloc.so=2"]
