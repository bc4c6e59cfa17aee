"""Every command returns 2 for arguments that are wrong, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.examples import example_words
from torchtitan_like import cli
from torchtitan_like.util.exit_codes import WRONG_INPUT

COMMANDS = {command.name: command for command in cli.executable_commands()}
# Wrong arguments that no parser refuses by itself.
WRONG = (
    "",
    "nothing",
    "config",
    "ckpt nothing",
    "config show nothing",
    "config copy nothing my.toml",
    "help nothing",
    "help steps --experimental.custom_import nothing",
    "train debug_model.toml --nproc 0",
    "train debug_model.toml --nproc many",
    "train debug_model.toml --nnodes 0",
    "train debug_model.toml --nnodes 2",
    "train debug_model.toml --nnodes 3:2 --master-addr a",
    "train debug_model.toml --node-rank x",
    "train debug_model.toml --master-port x",
    "train debug_model.toml --max-restarts x",
    "train debug_model.toml --log-rank 7",
    "train debug_model.toml --log-prefix x",
    "train debug_model.toml --numa-binding x",
    "train debug_model.toml --known-bad-gpus nothing",
    "train debug_model.toml --steps 3",
    "check debug_model.toml --plan h100-80g",
    "check debug_model.toml --plan nothing --world-size 2",
    "plan debug_model.toml",
    "plan --world-size 2",
    "plan debug_model.toml --world-size 2 --gpu nothing",
    "plan debug_model.toml --world-size 2 --cluster nothing",
    "plan debug_model.toml --world-size 2 --rank-of-stage 9",
    "plan debug_model.toml --world-size 2 --rank-of-stage 0 -o a.plan.json",
    "plan search debug_model.toml",
    "plan search --world-size 2",
    "plan search debug_model.toml --world-size 2 --max-memory 2",
    "plan search debug_model.toml --world-size 2 --gpu nothing",
    "data train-tokenizer --output out --vocab-size 257",
    "data tiny tokenizer nothing out --model.args.dim 3",
    "ckpt export nothing out --to pt --shard-gb 1",
    "generate nothing --top-p 2",
    "node check --known-bad nothing",
    "node bench --sizes 4TB",
    "run replay nothing",
    "run report nothing -o out.svg --redact",
    "run compare nothing plan.json --data-only",
)


def code_of(words: str) -> int | str | None:
    """Run `titan`. Returns its exit code."""
    try:
        return cli.main(words.split())
    except SystemExit as ended:
        return ended.code


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_return_2(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(words) == WRONG_INPUT
    captured = capsys.readouterr()
    assert captured.err and "Traceback" not in captured.err
    assert captured.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_returns_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=str(WRONG_INPUT)):
        cli.main([*example_words(name), "--nothing", "1"])
    assert "--nothing" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_numbers_are_checked_before_anything_else(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = cli.build_parser(COMMANDS[name])
    for action in parser._actions:
        if action.option_strings and action.metavar in ("N", "SECONDS", "GB", "K", "P", "T"):
            for value in ("many", "nan", "-1"):
                assert code_of(f"{name} {action.option_strings[-1]}={value}") == WRONG_INPUT
                assert action.option_strings[-1] in capsys.readouterr().err
