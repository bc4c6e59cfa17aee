"""Quantized weights of Hugging Face load the same bits on every layout with experts."""

import pytest
import torch

from tests.distributed.parity import build, options, release
from tests.distributed.test_matrix import TP
from tests.distributed.test_moe import EP, ETP
from tests.harness.family import Family
from tests.harness.rank_pool import run_ranks
from tests.unit.checkpoint.test_hf_experts import write_float8
from tests.unit.checkpoint.test_hf_gpt_oss import quantized_files
from torchtitan_like.checkpoint.hf import load as hf_load
from torchtitan_like.checkpoint.hf import safetensors_source
from torchtitan_like.distributed.initialize import weight_hash

EXPERTS = {"num_experts": 4, "top_k": 2, "n_layers": 2, "vocab_size": 2048}
GPT_OSS = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "moe_inter_dim": 64}
DEEPSEEK = {
    "dim": 160,
    "n_heads": 2,
    "inter_dim": 136,
    "moe_inter_dim": 136,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "score_func": "sigmoid",  # with softmax, Hugging Face's model has no biases
}
MAX_ELEMENTS = 4096  # of a read; a stacked parameter of experts has four to twenty times as many


def write_mxfp4(folder, family, args, model):
    quantized_files(folder, args, model)


def write_fp8(folder, family, args, model):
    write_float8(folder, family.spec, args, model)


FORMATS = {
    "MXFP4": ("gpt_oss", GPT_OSS, write_mxfp4),
    "float8": ("deepseek_v3", DEEPSEEK, write_fp8),
}
LAYOUTS = {"ep-fsdp": (4, {EP: 2}), "ep-etp": (4, {EP: 2, TP: 2, ETP: 2})}


def load_on_rank(argv):
    """Return the hash of the loaded weights of all ranks, and this rank's most elements of a read."""
    largest = 0
    plain_read_box, max_elements = safetensors_source.read_box, hf_load.MAX_ELEMENTS

    def traced_read_box(*args):
        nonlocal largest
        values = plain_read_box(*args)
        # One byte of MXFP4 contains two values.
        largest = max(largest, values.numel() * (2 if values.dtype == torch.uint8 else 1))
        return values

    safetensors_source.read_box, hf_load.MAX_ELEMENTS = traced_read_box, MAX_ELEMENTS
    try:
        trainer = build(argv)
    finally:
        safetensors_source.read_box, hf_load.MAX_ELEMENTS = plain_read_box, max_elements
    shares = trainer.world.step_group.gather_objects(sum(map(weight_hash, trainer.parts)))
    release(trainer)
    return sum(shares) % 2**64, largest


@pytest.mark.parametrize("name", FORMATS)
def test_every_layout_loads_the_same_bits(tmp_path, name):
    model_name, sizes, write = FORMATS[name]
    family = Family(model_name, "debugmodel", {**sizes, **EXPERTS})
    args, model = family.build(seed=3)
    stored = tmp_path / "stored"
    stored.mkdir()
    write(stored, family, args, model)

    def load(layout, ranks, overrides):
        argv = options(
            str(tmp_path / layout),
            "float32",
            **{f"model.args.{key}": value for key, value in family.sizes.items()},
            **{
                "model.name": model_name,
                "model.flavor": "debugmodel",
                "checkpoint.enable": "true",
                "checkpoint.initial_load_path": stored,
                "checkpoint.initial_load_in_hf": "true",
                "checkpoint.initial_load_in_hf_quantized": "true",
                "training.local_batch_size": 2,
            },
            **overrides,
        )
        for absent in ("multiple_of", "n_kv_heads"):  # arguments of Llama 3
            if absent not in family.sizes:
                index = argv.index(f"--model.args.{absent}")
                argv = argv[:index] + argv[index + 2 :]
        hashes, largest = zip(*run_ranks(load_on_rank, ranks, argv), strict=True)
        assert len(set(hashes)) == 1
        # Blocks of 32 values are read whole, and alternating rows with the rows between them.
        assert 0 < max(largest) <= 2 * MAX_ELEMENTS
        return hashes[0]

    family.load(stored, args, model, quantized=True)
    expected = load("one-rank", 1, {})
    assert expected == sum(map(weight_hash, [model])) % 2**64
    for layout, (ranks, overrides) in LAYOUTS.items():
        assert load(layout, ranks, overrides) == expected
