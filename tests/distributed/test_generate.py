"""`titan generate` reads checkpoints in any dtype and rejects other folders."""

import io
import json
import os
import re
import shutil
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_deepseek_v3, test_gpt_oss, test_llama4, test_moe
from tests.distributed.cells import Cells
from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT
from torchtitan_like.cli import main as titan
from torchtitan_like.config import ConfigError
from torchtitan_like.distributed.world import LaunchedAs
from torchtitan_like.inference.completion import Prompt, complete, encode_prompts
from torchtitan_like.inference.generation import Sampling
from torchtitan_like.inference.loading import inference_world, load_checkpoint
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


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step of a model with a context of 32 tokens."""
    run = tmp_path_factory.mktemp("generate") / "run"
    changes = {"training.steps": 1, "checkpoint.enable": "true", "model.args.max_seq_len": 32}
    run_ranks(train, 1, options(str(run), "float32", **changes))
    return run / "checkpoint/step-1"


def test_several_prompts_are_completed_as_json_and_as_text(step, tmp_path, monkeypatch, capsys):
    texts = ["To be", "First Citizen: Before we", "A"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = (step, "--num-tokens", 6, *GREEDY)
    document = json.loads(generate(capsys, *words, "--prompts", prompts, "--json"))
    completions = document["completions"]
    assert [each["prompt"] for each in completions] == texts
    assert [each["finish_reason"] for each in completions] == ["length"] * 3
    assert document["num_tokens"] == 18 == 3 * completions[0]["num_tokens"]
    assert document["tokens_per_second"] == pytest.approx(18 / document["seconds"])
    alone = [generate(capsys, *words, "--prompt", text) for text in texts]
    assert alone == [f"{each['prompt']}{each['text']}\n" for each in completions]
    repeated = [word for text in texts for word in ("--prompt", text)]
    assert titan(["generate", *map(str, words), *repeated, "--batch-size", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "\n".join(alone)
    assert re.fullmatch(r"18 tokens in [\d.]+ s: [\d.,]+ tokens per second\n", printed.err)
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompts.read_text()))
    assert generate(capsys, *words, "--prompts", "-") == printed.out


def test_text_ends_at_the_context_or_a_stop_string(step, capsys):
    words = (step, "--prompt", "To be", "--num-tokens", 100, *GREEDY, "--json")
    (whole,) = json.loads(generate(capsys, *words))["completions"]
    assert whole["finish_reason"] == "context"
    assert whole["num_prompt_tokens"] + whole["num_tokens"] == 32
    stop = whole["text"][5:8]
    (stopped,) = json.loads(generate(capsys, *words, "--stop", stop))["completions"]
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert stopped["finish_reason"] == "stop" and stopped["num_tokens"] < whole["num_tokens"]


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


def test_chat_prompts_go_through_the_template(step, tmp_path, capsys):
    assets = tmp_path / "assets"
    shutil.copytree(ROOT / "tests/assets/tokenizer", assets)
    (assets / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    )
    options = ("--assets", assets, "--num-tokens", 6, *GREEDY, "--json")
    plain = json.loads(generate(capsys, step, "--prompt", "user: To be ", *options))
    chat = json.loads(generate(capsys, step, "--prompt", "To be", "--chat", *options))
    assert chat["completions"][0]["prompt"] == [{"role": "user", "content": "To be"}]
    assert chat["completions"][0]["text"] == plain["completions"][0]["text"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "-1"), "--temperature is -1. Expected 0 or a number above 0"),
        (("--top-p", "0"), "--top-p is 0. Expected a number above 0, at most 1"),
        (("--prompt", "x", "--prompts", "-"), "--prompt and --prompts are both given"),
        (("--prompt", "x", "--stop", ""), "--stop is an empty string"),
        (("--prompt", "x", "--chat"), "has no chat template. Expected chat_template.jinja"),
        (("--prompt", "To be or not " * 20), "tokens. Expected fewer than the model's context"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_impossible_requests_are_rejected(step, words, message, capsys):
    assert titan(["generate", str(step), *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_folder_without_a_manifest_is_rejected(tmp_path, capsys):
    assert titan(["generate", str(tmp_path)]) == 2
    assert "no manifest.json" in capsys.readouterr().err


# ---- tensor parallelism

MODELS = {
    "llama3": {},
    "deepseek_v3": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "inter_dim": 32,
        "moe_inter_dim": 16,
        "num_experts": 4,
        "top_k": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "max_seq_len": 64,
        "load_balance": "none",
    },
    "gpt_oss": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "top_k": 2,
        "moe_inter_dim": 16,
        "sliding_window_size": 4,
        "max_seq_len": 64,
        "attn_type": "sdpa",
    },
}
PROMPTS = [Prompt("To be"), Prompt("First Citizen: Before we proceed any further"), Prompt("A")]


def load_and_complete(step, num_tokens=12):
    """Return the logits of a prompt, and completions of several, on the ranks of this pool."""
    rank = dist.get_rank()
    with inference_world(LaunchedAs(rank, rank, dist.get_world_size())) as world:
        loaded = load_checkpoint(step, world)
        prompts = encode_prompts(loaded, PROMPTS)
        with torch.no_grad():
            logits = loaded.model(torch.tensor(prompts[1:2]))
        done = [
            complete(loaded, prompts, num_tokens=num_tokens, sampling=sampling).completions
            for sampling in (Sampling(), Sampling(temperature=1.0, seed=3))
        ]
    return logits, done


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_ranks_generate_the_tokens_of_one_rank(tmp_path, name):
    sizes = {f"model.args.{key}": value for key, value in MODELS[name].items()}
    argv = options(str(tmp_path / "run"), "float32")
    if name != "llama3":
        start = argv.index("--model.args.dim")
        argv = argv[:start] + argv[argv.index("--training.dataset_path") :]
    changes = {"training.steps": 1, "checkpoint.enable": "true", "model.name": name, **sizes}
    run_ranks(train, 1, argv + [part for k, v in changes.items() for part in (f"--{k}", str(v))])
    step = tmp_path / "run/checkpoint/step-1"
    ((logits, expected),) = run_ranks(load_and_complete, 1, step)
    for sharded_logits, completions in run_ranks(load_and_complete, 2, step):
        torch.testing.assert_close(sharded_logits, logits, rtol=0, atol=1e-5)
        assert completions == expected


def load_on_ranks(step):
    rank = dist.get_rank()
    with inference_world(LaunchedAs(rank, rank, dist.get_world_size())) as world:
        try:
            load_checkpoint(step, world)
        except ConfigError as error:
            return str(error)
    return None


def test_ranks_must_divide_the_heads(tmp_path):
    changes = {"training.steps": 1, "checkpoint.enable": "true"}
    run_ranks(train, 1, options(str(tmp_path / "run"), "float32", **changes))
    for message in run_ranks(load_on_ranks, 4, tmp_path / "run/checkpoint/step-1"):
        assert "expected a number of ranks that divides n_kv_heads = 2 of llama3" in message
