"""`titan generate` and `titan eval` read checkpoints of any family and reject other folders."""

import json
import os
import re
import shutil
import threading

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.distributed import test_deepseek_v3, test_gpt_oss, test_llama4, test_moe
from tests.distributed.cells import Cells
from tests.distributed.parity import build, options, release
from tests.harness import stub_lm_eval
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT
from torchtitan_like.cli import main as titan
from torchtitan_like.inference import load_model
from torchtitan_like.stored_config import find_run_assets


def train(argv):
    trainer = build(argv)
    trainer.train()
    release(trainer)


def train_in(folder, argv):
    os.chdir(folder)
    train(argv)
    for thread in threading.enumerate():  # it writes to the current folder
        if thread.name == "environment":
            thread.join()


GREEDY = ("--temperature", "0")


def generate(capsys, *words):
    """Run `titan generate` and return what it prints to stdout."""
    assert titan(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("stored", "world_size"), [("float32", 2), ("bfloat16", 1)])
@pytest.mark.parametrize("add_bos", ["true", "false"])
def test_generate_continues_a_prompt(tmp_path, capsys, stored, world_size, add_bos):
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **{"training.dtype": stored, "training.mixed_precision_param": stored, "training.steps": 1},
        **{
            "checkpoint.enable": "true",
            "training.local_batch_size": 8 // world_size,
            "data.add_bos": add_bos,
        },
        **{"model.args.max_seq_len": 32},
    )
    run_ranks(train, world_size, argv)
    step = str(tmp_path / "run/checkpoint/step-1")
    # The text ends at the model's context length.
    first = generate(capsys, step, "--prompt", "To be", "--num-tokens", "40", *GREEDY)
    assert first.startswith("To be") and len(first) > len("To be\n")
    assert generate(capsys, step, "--prompt", "To be", "--num-tokens", "40", *GREEDY) == first
    assert titan(["generate", step, "--num-tokens", "2"]) == (0 if add_bos == "true" else 2)
    assert ("give a --prompt" in capsys.readouterr().err) == (add_bos == "false")


FAMILIES = {
    "qwen3": Cells(test_moe.MODEL, {}),
    "gpt_oss": test_gpt_oss.CELLS,
    "llama4": test_llama4.CELLS,
    "deepseek_v3": test_deepseek_v3.CELLS,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family_step(request, tmp_path_factory):
    """A step of a model with experts, with a context of 32 tokens."""
    run = tmp_path_factory.mktemp(request.param) / "run"
    changes = {"training.steps": 1, "checkpoint.enable": "true", "model.args.max_seq_len": 32}
    run_ranks(train, 1, FAMILIES[request.param].settings(run, **changes))
    return run / "checkpoint/step-1"


def test_models_with_experts_continue_a_prompt(family_step, capsys):
    """Latent attention, windows, chunks and sinks work beyond the length of a window."""
    text = generate(capsys, family_step, "--prompt", "To be", "--num-tokens", 40, *GREEDY)
    assert text.startswith("To be") and len(text) > len("To be\n")


def test_evaluation_uses_the_weights_of_the_step(family_step, tmp_path, monkeypatch, capsys):
    """The loss in transformers, of the export, equals the loss of the step."""
    stub_lm_eval.install(monkeypatch, tmp_path)
    words = ["eval", str(family_step), "--tasks", "words", "--dtype", "float32", "--json"]
    assert titan(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    loaded = load_model.load_checkpoint(family_step, dtype="float32")
    ids = torch.tensor([loaded.tokenizer.encode(stub_lm_eval.TEXT)])
    with torch.no_grad():
        loss = cross_entropy(loaded.model(ids)[0, :-1], ids[0, 1:]).item()
    assert row["value"] == pytest.approx(loss, rel=1e-5)
    assert (row["step"], row["metric"]) == (1, "loss")


def test_relative_tokenizer_path_works_from_other_folders(tmp_path, monkeypatch, capsys):
    """The path is relative to the run's start folder, the repository, or `--assets`."""
    home, step = tmp_path / "home", tmp_path / "run/checkpoint/step-1"
    shutil.copytree(ROOT / "tests/assets/tokenizer", home / "assets")
    changes = {"training.steps": 1, "checkpoint.enable": "true", "model.hf_assets_path": "./assets"}
    run_ranks(train_in, 1, home, options(str(tmp_path / "run"), "float32", **changes))
    facts = tmp_path / "run/attempts/1/environment/facts.json"
    (tmp_path / "run/attempts/2/environment").mkdir(parents=True)
    (tmp_path / "run/attempts/2/environment/facts.json").write_text("{")  # a killed attempt
    monkeypatch.chdir(tmp_path)
    assert titan(["ckpt", "export", str(step), "exported"]) == 0
    assert (tmp_path / "exported/tokenizer.json").exists()
    assert titan(["ckpt", "export", str(step), "."]) == 2
    command = [str(step), "--prompt", "To be", "--num-tokens", "2"]
    assert titan(["generate", *command]) == 0
    facts.unlink()
    assert titan(["generate", *command]) == 2
    assert (
        "there is no tokenizer at assets. Expected the tokenizer of the model: give its folder with"
        in capsys.readouterr().err
    )
    assert titan(["generate", *command, "--assets", "home/assets"]) == 0
    assert find_run_assets("./tests/assets/tokenizer", step) == ROOT / "tests/assets/tokenizer"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step of a model with a context of 32 tokens."""
    run = tmp_path_factory.mktemp("generate") / "run"
    changes = {"training.steps": 1, "checkpoint.enable": "true", "model.args.max_seq_len": 32}
    run_ranks(train, 1, options(str(run), "float32", **changes))
    return run / "checkpoint/step-1"


def test_several_prompts_are_completed_as_json_and_as_text(step, capsys):
    texts = ["To be", "First Citizen: Before we", "A"]
    words = (step, "--num-tokens", 6, *GREEDY)
    repeated = [word for text in texts for word in ("--prompt", text)]
    document = json.loads(generate(capsys, *words, *repeated, "--json"))
    completions = document["completions"]
    assert [each["prompt"] for each in completions] == texts
    assert [each["finish_reason"] for each in completions] == ["length"] * 3
    assert document["num_tokens"] == 18 == 3 * completions[0]["num_tokens"]
    assert document["tokens_per_second"] == pytest.approx(18 / document["seconds"])
    alone = [generate(capsys, *words, "--prompt", text) for text in texts]
    assert alone == [f"{each['prompt']}{each['text']}\n" for each in completions]
    assert titan(["generate", *map(str, words), *repeated]) == 0
    printed = capsys.readouterr()
    assert printed.out == "\n".join(alone)
    assert re.fullmatch(r"18 tokens in [\d.]+ s: [\d.,]+ tokens per second\n", printed.err)


def test_equal_prompts_get_different_texts(step, capsys):
    words = (step, "--num-tokens", 6, "--seed", 3, "--prompt", "A", "--prompt", "A", "--json")
    first, second = json.loads(generate(capsys, *words))["completions"]
    assert first != second
    assert json.loads(generate(capsys, *words))["completions"] == [first, second]


def test_text_ends_at_the_context(step, capsys):
    words = (step, "--prompt", "To be", "--num-tokens", 100, *GREEDY, "--json")
    (whole,) = json.loads(generate(capsys, *words))["completions"]
    assert whole["finish_reason"] == "context"
    assert whole["num_prompt_tokens"] + whole["num_tokens"] == 32


def test_export_generates_the_text_of_its_step(step, tmp_path, capsys):
    exported = tmp_path / "exported"
    assert titan(["ckpt", "export", str(step), str(exported)]) == 0
    capsys.readouterr()
    words = ("--prompt", "To be", "--num-tokens", 8, *GREEDY)
    assert generate(capsys, exported, *words) == generate(capsys, step, *words)
    config = exported / "config.json"
    config.chmod(0o644)
    config.write_text(config.read_text().replace("float32", "int8"))
    assert titan(["generate", str(exported)]) == 2
    assert "has dtype 'int8'. Expected one of float16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "-1"), "--temperature: it is '-1'. Expected a number, 0 or more"),
        (("--top-p", "0"), "--top-p: it is '0'. Expected a number above 0, at most 1"),
    ],
)
def test_impossible_numbers_are_rejected(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        titan(["generate", "x", *words])
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_a_prompt_longer_than_the_context_is_rejected(step, capsys):
    assert titan(["generate", str(step), "--prompt", "To be or not " * 20]) == 2
    printed = capsys.readouterr()
    assert "tokens. Expected fewer than the model's context" in printed.err and printed.out == ""


def test_folder_without_a_manifest_is_rejected(tmp_path, capsys):
    assert titan(["generate", str(tmp_path)]) == 2
    assert "no manifest.json" in capsys.readouterr().err


def test_model_that_does_not_fit_is_rejected(step, monkeypatch, capsys):
    monkeypatch.setattr(load_model, "available_bytes", lambda: 2**10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert titan(["generate", str(step)]) == 2
    assert (
        "GiB, and cpu has 0.0 GiB free. Expected a model that fits one device: give --dtype "
        "bfloat16, or use `titan ckpt export`, and then vLLM" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", [("generate",), ("eval", "--tasks", "words")])
def test_ranks_of_torchrun_are_rejected(step, command, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert titan([command[0], str(step), *command[1:]]) == 2
    assert "runs in one process. Expected to be started without torchrun" in capsys.readouterr().err
