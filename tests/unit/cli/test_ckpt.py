"""`titan ckpt`: reports on intact and damaged folders, and conversions."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint.folders import SHARD, flip_bit, make_steps
from tests.unit.checkpoint.steps import MODEL, make_step, write_step
from torchtitan_like.checkpoint import step_folders
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.cli import executable_commands, main, parse
from torchtitan_like.cli.common import run_path, step_path, steps_path
from torchtitan_like.util.output import ProgressLine
from torchtitan_like.util.units import format_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint of a tiny model: float32 weights, one moment, the step number, and text."""
    return make_step(tmp_path_factory.mktemp("run") / "step-7", MODEL)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Run `titan ckpt`. Return the exit code and all output."""
    code = main(["ckpt", *(str(part) for part in argv)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


# ---- ls, show, verify


def test_ls_lists_everything_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_steps(tmp_path, "10", "20w", "30!", "40m", "50?", "60H")
    make_steps(tmp_path / "hf", "20h")
    (tmp_path / "step-10" / "PIN").touch()
    for name in ("step-70.tmp-ab", "step-80.superseded-cd", ".trash-5", "step-90.nonfinite"):
        (tmp_path / name).mkdir()
    code, text = run(capsys, "ls", tmp_path)
    assert code == 0
    lines = {line.split()[0]: line for line in text.splitlines()}
    expected = {
        "step-10": ("full", " B ", "0 s ago", "pinned"),
        "step-20": ("weights",),
        "step-30": ("DAMAGED", "has 50 bytes. Expected 100: "),
        "step-40": ("DAMAGED", "manifest.json is damaged"),
        "step-50": ("incomplete", "no manifest.json"),
        "step-60": ("foreign", "Hugging Face safetensors"),
        "step-70.tmp-ab": ("unfinished",),
        "step-80.superseded-cd": ("superseded",),
        "step-90.nonfinite": ("non-finite",),
        ".trash-5": ("being deleted",),
        "hf/step-20": ("hf",),
    }
    assert lines.keys() == expected.keys()
    for name, parts in expected.items():
        assert all(part in lines[name] for part in parts), lines[name]


@pytest.mark.parametrize(
    ("command", "call"),
    [("ls", "stat"), ("ls", "read_text"), ("verify", "stat"), ("verify", "read_text")],
)
def test_a_step_deleted_during_a_report_is_not_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    call: str,
) -> None:
    """The step is deleted before the first file access, the second one, and so on."""

    def num_accesses(deleted_at: int) -> int:
        folder, accesses = tmp_path / str(deleted_at), 0
        owner: Any = Path if call == "stat" else step_folders
        original = getattr(owner, call)

        def counted(path: Path, *args: Any, **options: Any) -> Any:
            nonlocal accesses
            if "step-10" in path.parts:
                accesses += 1
                if accesses == deleted_at:
                    os.rename(folder / "step-10", folder / ".trash-10")
            return original(path, *args, **options)

        make_steps(folder, "10", "20")
        with monkeypatch.context() as patched:
            patched.setattr(owner, call, counted)
            code, text = run(capsys, command, folder)
        assert (code, "step-20" in text, "DAMAGED" in text, "missing" in text) == (
            0,
            True,
            False,
            False,
        ), text
        return accesses

    accesses = num_accesses(0)
    assert accesses > 0
    for deleted_at in range(1, accesses + 1):
        num_accesses(deleted_at)


def test_ls_refuses_a_folder_without_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"{tmp_path} contains no step-N. Expected a run's checkpoint folder: check the path\n"
    assert run(capsys, "ls", tmp_path) == (2, message)


@pytest.mark.parametrize("below", ["", "checkpoint"])
def test_a_run_means_its_checkpoint_folder(below: str, tmp_path: Path) -> None:
    make_steps(tmp_path / "run/checkpoint", "9", "10")
    assert steps_path(str(tmp_path / "run" / below)) == tmp_path / "run/checkpoint"


def test_a_step_and_a_folder_of_exports_alone_stay(tmp_path: Path) -> None:
    make_steps(tmp_path / "step", "9")
    make_steps(tmp_path / "exports/hf", "9")
    for path in (tmp_path / "step/step-9", tmp_path / "exports", tmp_path / "missing"):
        assert steps_path(str(path)) == path


@pytest.mark.parametrize("below", ["", "checkpoint", "checkpoint/step-10"])
def test_a_step_or_its_folder_means_the_run(below: str, tmp_path: Path) -> None:
    make_steps(tmp_path / "checkpoint", "9", "10")
    (tmp_path / "attempts/1").mkdir(parents=True)
    assert run_path(str(tmp_path / below)).resolve() == tmp_path.resolve()
    attempt = tmp_path / "attempts/1"
    assert run_path(str(attempt)) == attempt  # `titan run compare --environment` reads it


@pytest.mark.parametrize("below", ["", "checkpoint"])
def test_the_newest_step_is_used_and_named(
    below: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_steps(tmp_path / "checkpoint", "9", "10")
    newest = tmp_path / "checkpoint/step-10"
    assert step_path(str(tmp_path / below)) == newest
    assert capsys.readouterr().err == f"Using {newest}, the newest step\n"
    assert step_path(str(newest)) == newest and capsys.readouterr().err == ""
    monkeypatch.setenv("WORLD_SIZE", "2")  # each rank might see another one
    assert step_path(str(tmp_path / below)) == tmp_path / below


@pytest.mark.parametrize("words", ["ckpt show", "ckpt export", "generate", "eval", "data show"])
def test_commands_of_a_step_accept_a_run(words: str, tmp_path: Path) -> None:
    make_steps(tmp_path / "checkpoint", "9", "10")
    options = {"export": ["out"], "data": ["--step", "1"]}
    options["eval"] = ["--tasks", "next_word"]
    extra = [option for word in words.split() for option in options.get(word, [])]
    (command,) = (command for command in executable_commands() if command.name == words)
    parsed = vars(parse(command, [str(tmp_path), *extra]))
    assert tmp_path / "checkpoint/step-10" in parsed.values()


@pytest.mark.parametrize("below", ["", "checkpoint", "checkpoint/step-7"])
@pytest.mark.parametrize("command", ["ls", "verify"])
def test_ls_and_verify_accept_a_run_its_checkpoint_folder_and_a_step(
    command: str, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").mkdir()
    make_step(tmp_path / "checkpoint/step-7", MODEL)
    code, text = run(capsys, command, tmp_path / below)
    assert code == 0 and "step-7" in text


def test_show_lists_the_manifest_and_every_tensor(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "show", step)
    assert code == 0
    assert {"kind: full", "step: 7", "seed: 1", "format_version: 3"} <= set(text.splitlines())
    assert "model.layers.1.attention.wk.weight  float32  [16, 32]" in text
    assert "optimizer.step  int64  []" in text
    assert "train_state.json  (not a tensor)" in text


def test_verify_reads_every_step_and_reports_all_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_steps(tmp_path, "1", "2", "3!", "4m", "5w")
    make_steps(tmp_path / "hf", "5h")
    (tmp_path / "step-2" / "model.safetensors").touch()
    code, text = run(capsys, "verify", tmp_path / "step-2")
    assert (
        code == 0
        and "step-2: files that are not in the manifest, not verified: model.safetensors" in text
    )
    flip_bit(tmp_path / "step-2" / SHARD, 50)
    code, text = run(capsys, "verify", tmp_path)
    assert code == 1
    for name in ("step-1", "step-5", "hf/step-5"):
        assert f"{tmp_path / name}: intact, 100 B verified" in text
    assert f"{tmp_path / 'step-2' / SHARD} is damaged: extent 0 (bytes 0 to 100)" in text
    assert f"{tmp_path / 'step-3' / SHARD} has 50 bytes. Expected 100: " in text
    assert f"{tmp_path / 'step-4' / 'manifest.json'} is damaged" in text
    for broken in ("step-2", "step-3", "step-4"):
        assert run(capsys, "verify", tmp_path / broken)[0] == 1
    assert run(capsys, "verify", tmp_path / "step-9")[0] == 2


def test_progress_shows_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine("", format_bytes)
    for done, seconds in ((1, 0.5), (2 * 2**20, 12.0), (3 * 2**20, 14.0), (8 * 2**20, 16.0)):
        progress("step-5", done, 8 * 2**20, seconds)
    assert capsys.readouterr().err.splitlines() == [
        "step-5: 2.0 MiB of 8.0 MiB, 25%, 170.7 KiB/s, 36 s left   ",
        "step-5: 8.0 MiB of 8.0 MiB, 100%, 512.0 KiB/s, 0 s left   ",
    ]


def test_json_output(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steps(tmp_path, "10", "20!")

    def parse(*argv: object) -> tuple[int, Any]:
        code = main(["ckpt", *(str(part) for part in argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, entries = parse("ls", tmp_path)
    assert code == 0
    assert [(entry["name"], entry["kind"]) for entry in entries] == [
        ("step-10", "full"),
        ("step-20", "DAMAGED"),
    ]
    assert entries[0]["num_bytes"] > 100 and entries[0]["notes"] == []
    code, results = parse("verify", tmp_path)
    assert code == 1
    assert results[0] == {
        "path": str(tmp_path / "step-10"), "damage": [], "num_bytes": 100, "unlisted": [], "is_gone": False,
    }  # fmt: skip
    assert len(results[1]["damage"]) == 1
    code, summary = parse("show", step)
    assert code == 0 and summary["format"] == "native" and summary["manifest"]["step"] == 7
    assert summary["tensors"]["optimizer.step"] == {"dtype": "int64", "shape": []}
    assert summary["objects"] == ["train_state.json"]


# ---- diff


def test_diff_reports_settings_names_shapes_and_numbers(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "diff", step, step) == (0, "23 of 23 common tensors are equal bit for bit\n")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((step / "manifest.json").read_text())["config"].replace(
        "n_layers = 2", "n_layers = 3"
    )
    state: dict[str, Any] = open_checkpoint(step).read_all()
    state["model.norm.weight"][3] += 0.5
    state["model.output.weight"] = state["model.output.weight"].bfloat16()
    write_step(other, state | {"model.new": torch.zeros(1)}, config)
    code, text = run(capsys, "diff", step, other)
    assert code == 1
    assert text.splitlines() == [
        "model.args.n_layers 2 -> 3",
        f"optimizer.state.norm.weight.exp_avg: only in {step}",
        f"optimizer.step: only in {step}",
        f"train_state.json: only in {step}",
        f"model.new: only in {other}",
        "model.norm.weight: max abs difference 5.000e-01",
        "model.output.weight: float32 [2048, 32] -> bfloat16 [2048, 32]",
        "19 of 21 common tensors are equal bit for bit",
    ]


def test_a_damaged_checkpoint_cannot_be_compared(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 1 would mean that two intact checkpoints differ."""
    damaged = shutil.copytree(step, tmp_path / "step-7")
    flip_bit(next(damaged.glob("shard-*.bin")), 50)
    code, text = run(capsys, "diff", step, damaged)
    assert code == 2 and "is damaged" in text


def test_diff_compares_values_that_are_not_tensors(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, position in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        state = {"model.w": torch.ones(2), "train_state.json": json.dumps({"position": position})}
        write_step(tmp_path / name, state, "")
        groups = [{"lr": float("nan"), "w": torch.ones(2)}, {"lr": position}]
        torch.save({"w": torch.ones(2), "groups": groups}, tmp_path / f"{name}.pt")
    code, text = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and """train_state.json: '{"position": 1}' -> '{"position": 2}'""" in text
    code, text = run(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1 and text.startswith("groups: [{'lr': nan")
    assert run(capsys, "diff", tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0


# ---- export to other formats


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "pt"])
def test_conversion_to_every_format_and_back_is_exact(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    config = ["--config", step / "config.toml"]
    assert run(capsys, "export", step, tmp_path / "converted", "--to", to)[0] == 0
    assert (
        run(capsys, "export", tmp_path / "converted", tmp_path / "back", "--to", "native", *config)[
            0
        ]
        == 0
    )
    code, text = run(capsys, "diff", step, tmp_path / "back")
    assert text.splitlines()[-1] == "21 of 21 common tensors are equal bit for bit"
    assert run(capsys, "verify", tmp_path / "back")[0] == 0
    code, text = run(capsys, "diff", step, tmp_path / "converted", *config)
    assert text.splitlines()[-1] == "21 of 21 common tensors are equal bit for bit"
    assert sorted(os.listdir(tmp_path)) == ["back", "converted"]


def test_a_tied_weight_is_converted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = make_step(tmp_path / "step-7", {**MODEL, "enable_weight_tying": "true"})
    assert run(capsys, "export", step, tmp_path / "hf", "--to", "hf")[0] == 0
    config = ("--config", step / "config.toml")
    assert (
        run(capsys, "export", tmp_path / "hf", tmp_path / "back", "--to", "native", *config)[0] == 0
    )
    weights = open_checkpoint(tmp_path / "back").read_all()
    assert "model.output.weight" not in weights
    assert all(
        torch.equal(tensor, open_checkpoint(step).read(name)) for name, tensor in weights.items()
    )


def test_pt_files_have_the_row_order_of_meta(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "export", step, tmp_path / "m.pt", "--to", "pt")
    run(capsys, "export", step, tmp_path / "hf", "--to", "hf")
    meta, external = torch.load(tmp_path / "m.pt"), load_file(tmp_path / "hf" / "model.safetensors")
    halves = external["model.layers.0.self_attn.q_proj.weight"].view(4, 2, 4, 32)
    assert torch.equal(meta["layers.0.attention.wq.weight"], halves.transpose(1, 2).reshape(32, 32))
    assert torch.equal(
        meta["layers.0.attention.wv.weight"], external["model.layers.0.self_attn.v_proj.weight"]
    )


def test_a_change_of_dtype_keeps_everything_else(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only floating-point dtypes change, for any model. The index has the new size."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = {
        "a.weight": torch.randn(30, 10),
        "a.count": torch.arange(5),
        "b.mask": torch.tensor([True, False]),
    }
    parts = {
        "model-00001-of-00002.safetensors": ["a.weight", "b.mask"],
        "model-00002-of-00002.safetensors": ["a.count"],
    }
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, source / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text('{"model_type": "other", "torch_dtype": "float32"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "original").mkdir()
    (source / "original/tokenizer.model").write_text("YQ== 0")
    out = tmp_path / "out"
    assert run(capsys, "export", source, out, "--to", "hf", "--dtype", "bfloat16")[0] == 0
    assert (out / "original/tokenizer.model").read_text() == "YQ== 0"
    assert run(capsys, "verify", out)[0] == 0
    converted = {name: tensor for file in parts for name, tensor in load_file(out / file).items()}
    assert torch.equal(converted["a.weight"], tensors["a.weight"].bfloat16())
    assert torch.equal(converted["a.count"], tensors["a.count"]) and torch.equal(
        converted["b.mask"], tensors["b.mask"]
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 600 + 40 + 2}, "weight_map": weight_map}
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "other", "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }  # fmt: skip
    assert (out / "tokenizer.json").read_text() == "{}"


def test_a_converted_pt_file_stores_only_the_sliced_elements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = torch.randn(1000, 1000)
    saved = {
        "model": {"w": large[3], "n": torch.tensor(3)},
        "groups": [{"lr": 0.1, "w": large[:, 5]}],
    }
    torch.save(saved, tmp_path / "large.pt")
    assert run(capsys, "export", tmp_path / "large.pt", tmp_path / "small.pt", "--to", "pt")[0] == 0
    assert (
        (tmp_path / "large.pt").stat().st_size
        > 4_000_000
        > 20_000
        > (tmp_path / "small.pt").stat().st_size
    )
    assert run(capsys, "export", tmp_path / "small.pt", tmp_path / "dcp", "--to", "dcp")[0] == 0
    assert (
        run(
            capsys,
            "export",
            tmp_path / "dcp",
            tmp_path / "back.pt",
            "--to",
            "pt",
            "--dtype",
            "float16",
        )[0]
        == 0
    )
    back = torch.load(tmp_path / "back.pt")
    assert torch.equal(back["model"]["w"], large[3].half())
    assert torch.equal(back["groups"][0]["w"], large[:, 5].half())
    assert back["model"]["n"].dtype == torch.int64 and back["groups"][0]["lr"] == 0.1


def test_a_native_step_in_bfloat16_is_half_as_large(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(capsys, "export", step, tmp_path / "out", "--to", "native", "--dtype", "bfloat16")[0]
        == 0
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["step"]) == ("weights", 7)
    text = run(capsys, "show", tmp_path / "out")[1]
    assert (
        "float32" not in text.split("model.", 1)[1]
        and "optimizer" not in text.split("model.", 1)[1]
    )


def test_tensors_of_a_wider_dtype_keep_their_precision(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights in bfloat16, norms in float32."""
    run(capsys, "export", step, tmp_path / "hf", "--to", "hf")
    external = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(
        {n: t + 1e-4 if "norm" in n else t.bfloat16() for n, t in external.items()},
        tmp_path / "hf/model.safetensors",
    )
    for file in ("manifest.json", "config.toml"):  # as if another program wrote the checkpoint
        (tmp_path / "hf" / file).unlink()
    config = ["--config", step / "config.toml"]
    assert (
        run(capsys, "export", tmp_path / "hf", tmp_path / "out", "--to", "native", *config)[0] == 0
    )
    after, before = open_checkpoint(tmp_path / "out"), open_checkpoint(step)
    assert torch.equal(after.read("model.norm.weight"), before.read("model.norm.weight") + 1e-4)
    assert torch.equal(
        after.read("model.output.weight"), before.read("model.output.weight").bfloat16().float()
    )


def test_overflow_of_a_narrower_dtype_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(
        {"fits": torch.tensor([65504.0]), "deep": {"not": torch.tensor([1.0, -1e5])}},
        tmp_path / "m.pt",
    )
    for dtype, text in (("bfloat16", ""), ("float16", "1 tensors overflow to infinity in float16")):
        caplog.clear()
        assert (
            main(
                [
                    "ckpt",
                    "export",
                    str(tmp_path / "m.pt"),
                    str(tmp_path / dtype),
                    "--to",
                    "pt",
                    "--dtype",
                    dtype,
                ]
            )
            == 0
        )
        assert text in caplog.text and ("deep.not" in caplog.text) == bool(text)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["{step}", "{tmp}", "--to", "pt"], "exists already"),
        (["{tmp}/m.pt", "{tmp}/out", "--to", "hf"], "give --config"),
        (["{tmp}/nothing", "{tmp}/out", "--to", "hf"], "is not a checkpoint of a supported format"),
        (["{tmp}/text.pt", "{tmp}/out", "--to", "dcp"], "text.pt cannot be read: UnpicklingError"),
        (["{tmp}/m.pt", "{tmp}/out", "--to", "hf", "--config", "{step}/config.toml"], "missing"),
    ],
)
def test_a_failed_conversion_leaves_no_file(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    torch.save({"norm.weight": torch.ones(32)}, tmp_path / "m.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    code, output = run(capsys, "export", *(part.format(step=step, tmp=tmp_path) for part in argv))
    assert code == (1 if "cannot be read" in text else 2) and text in output
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "text.pt"]


def test_damage_is_reported_before_anything_is_written(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(step, tmp_path / "step")
    flip_bit(tmp_path / "step" / SHARD, 500)
    code, text = run(capsys, "export", tmp_path / "step", tmp_path / "out.pt", "--to", "pt")
    assert code == 1 and f"{SHARD} is damaged" in text
    assert os.listdir(tmp_path) == ["step"]
