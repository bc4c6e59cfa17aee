"""scripts/trace_lines.py leaves the line at which a process stands; scripts/trace_ranks.py finds the odd rank out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import trace_lines, trace_ranks
from tests.harness.runner import ROOT

PROGRAM = """import json, sys
def wait(words):
    json.dumps(words)
    print("ready", flush=True); sys.stdin.readline()
    return "woken"
print(wait(sys.argv[1:]))
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 3, which stands in line 4 of its program until it is told to go on."""
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRACE_TO": "traces", "TRACE_PACKAGES": "program", "RANK": "3"}
    command = [sys.executable, str(ROOT / "scripts/trace_lines.py"), "-m", "program", "--a", "b"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_the_last_line_is_where_a_process_stands(tmp_path: Path, waiting: subprocess.Popen[str]) -> None:
    [file] = (tmp_path / "traces").iterdir()
    assert re.fullmatch(rf"trace-[^.]+-3-{waiting.pid}\.txt", file.name)
    lines = file.read_text().splitlines()
    assert re.fullmatch(r" +\d+\.\d{6} MainThread program\.py:4 \| print\(.*\); sys\.stdin\.readline\(\)", lines[-1])
    assert [line.split()[2] for line in lines] == [f"program.py:{n}" for n in (1, 2, 6, 3, 4)], "json is not ours"
    assert waiting.communicate("\n")[0] == "woken\n"
    assert file.read_text().splitlines()[-1].endswith('program.py:5 | return "woken"')


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["program"], {"TRACE_TO": "x"}, "expected -m MODULE"),
        (["-m", "program"], {}, "expected -m MODULE"),
        (["-m", "json"], {"TRACE_TO": "x", "TRACE_PACKAGES": "torchtitan_like,no_such"}, "no package 'no_such'"),
    ],
)
def test_what_cannot_be_traced(words, variables, said, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("TRACE_TO", "TRACE_PACKAGES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert trace_lines.main(words) == 2
    assert said in capsys.readouterr().err


def write(folder: Path, rank: int, *places: str, torn: str = "") -> None:
    lines = [f"{second:12.6f} {place}\n" for second, place in enumerate(places)]
    (folder / f"trace-node-7-{rank}-{900 + rank}.txt").write_text("".join(lines) + torn)


def test_the_odd_rank_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 2 waits elsewhere, after one all_reduce less; a background thread's and a torn line say nothing."""
    step = "MainThread train.py:1 | all_reduce(x)"
    for rank in (0, 1, 10):
        write(tmp_path, rank, step, step, "MainThread train.py:9 | wait()", "saver save.py:5 | all_reduce(y)")
    write(tmp_path, 2, step, "MainThread data.py:3 | read()", torn="   9.0 MainThread tr")
    assert trace_ranks.main([str(tmp_path), "--last", "1", "--count", "all_reduce"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "3 of 4 ranks, last heard 2.0 s after the start:",
        "    train.py:9 | wait()",
        "  rank 0 (node-7, process 900)",
        "  rank 1 (node-7, process 901)",
        "  rank 10 (node-7, process 910)",
        "1 of 4 ranks, last heard 1.0 s after the start:",
        "    data.py:3 | read()",
        "  rank 2 (node-7, process 902)",
        "lines with 'all_reduce': 2 on ranks 0, 1, 10; 1 on ranks 2",
    ]
    (tmp_path / "trace-node-7-2-902.txt").unlink()
    assert trace_ranks.main([str(tmp_path), "--count", "all_reduce"]) == 0
    assert trace_ranks.main([str(tmp_path), "--thread", "saver", "--last", "1"]) == 0
    assert "save.py:5" in capsys.readouterr().out


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_ranks.main([str(tmp_path)]) == 2
    assert "holds no trace-" in capsys.readouterr().err
