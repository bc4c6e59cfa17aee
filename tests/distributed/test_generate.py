"""`titan generate` reads checkpoints in any dtype and rejects other folders."""

import os
import shutil
import threading

import pytest
import torch

from tests.distributed import test_deepseek_v3, test_gpt_oss, test_llama4, test_moe
from tests.distributed.cells import Cells
from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT
from tests.unit.cli.test_data_tiny import llama2
from torchtitan_like.cli import main as titan
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.generate import decode_continuation, generate
from torchtitan_like.stored_config import find_assets


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
    # More tokens than the model's context length
    assert (
        titan(["generate", step, "--prompt", "To be", "--num-tokens", "40", "--temperature", "0"])
        == 0
    )
    first = capsys.readouterr().out
    assert first.startswith("To be") and len(first) > len("To be\n")
    assert (
        titan(["generate", step, "--prompt", "To be", "--num-tokens", "40", "--temperature", "0"])
        == 0
    )
    assert capsys.readouterr().out == first
    assert titan(["generate", step, "--num-tokens", "2"]) == (0 if add_bos == "true" else 2)
    assert ("give a --prompt" in capsys.readouterr().err) == (add_bos == "false")


FAMILIES = {
    "qwen3": Cells(test_moe.MODEL, {}),
    "gpt_oss": test_gpt_oss.CELLS,
    "llama4": test_llama4.CELLS,
    "deepseek_v3": test_deepseek_v3.CELLS,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_models_with_experts_continue_a_prompt(tmp_path, capsys, name):
    """Latent attention, windows, chunks and sinks work beyond the length of a window."""
    changes = {"training.steps": 1, "checkpoint.enable": "true", "model.args.max_seq_len": 32}
    run_ranks(train, 1, FAMILIES[name].settings(tmp_path / "run", **changes))
    step = str(tmp_path / "run/checkpoint/step-1")
    command = ["generate", step, "--prompt", "To be", "--num-tokens", "40", "--temperature", "0"]
    assert titan(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("To be") and len(text) > len("To be\n")


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
    to_hf = ["convert", str(step), "converted", "--to", "hf"]
    assert titan(["ckpt", "export", str(step), "exported"]) == 0 == titan(["ckpt", *to_hf])
    assert (tmp_path / "exported/tokenizer.json").exists() and (
        tmp_path / "converted/tokenizer.json"
    ).exists()
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
    assert find_assets("./tests/assets/tokenizer", step) == ROOT / "tests/assets/tokenizer"


def test_folder_without_a_manifest_is_rejected(tmp_path, capsys):
    assert titan(["generate", str(tmp_path)]) == 2
    assert "no manifest.json" in capsys.readouterr().err


def test_context_window_slides_and_eos_ends_generation():
    inputs = []

    def model(tokens):
        inputs.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(tokens + 1, 10).float()

    model.parameters = lambda: iter([torch.zeros(1)])
    added = generate(model, [1, 2], num_tokens=9, temperature=0, top_k=1, stop=6, window=3)
    assert added == [3, 4, 5]
    assert inputs == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_continuation_keeps_its_leading_space(tmp_path):
    """Llama 2's decoder removes one space from the start of every text."""
    llama2().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    prompt, tokens = tokenizer.encode("To be"), tokenizer.encode("To be or not")
    assert tokens[: len(prompt)] == prompt and tokenizer.decode(tokens[len(prompt) :]) == "or not"
    assert decode_continuation(tokenizer, prompt, tokens[len(prompt) :]) == " or not"
    assert decode_continuation(tokenizer, prompt, []) == ""
