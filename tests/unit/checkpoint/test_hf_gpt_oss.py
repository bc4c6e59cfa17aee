"""Exports and loads of gpt-oss: alternating projections, biases, sinks, and MXFP4 weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.family import Family
from tests.harness.hf_weights import to_external
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf import load as hf_load
from torchtitan_like.checkpoint.hf import quantized, safetensors_source
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.checkpoint.source import Read
from torchtitan_like.models import resolve_args
from torchtitan_like.models.hf_table import Row, links

SIZES = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "num_experts": 3,
    "top_k": 2,
    "moe_inter_dim": 96,
}


FAMILY = Family("gpt_oss", "debugmodel", SIZES)
GPT_OSS, build, export, load = FAMILY.spec, FAMILY.build, FAMILY.export, FAMILY.load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_read_back_bit_for_bit(tmp_path, dtype):
    FAMILY.assert_an_export_is_read_back(tmp_path, dtype)


def test_gate_and_up_projections_alternate(tmp_path):
    args, model = build()
    export(tmp_path, args, model, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    experts = model.layers["1"].moe.experts
    gate_up = stored["model.layers.1.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (3, 64, 192)
    assert torch.equal(gate_up[2, :, 10], experts.w1[2, 5])
    assert torch.equal(gate_up[2, :, 11], experts.w3[2, 5])
    bias = stored["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert torch.equal(bias[:, 0::2], experts.b1)
    assert torch.equal(bias[:, 1::2], experts.b3)
    down = stored["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(down[1].T, experts.w2[1])


def test_torchtitan_stores_both_projections_in_rows():
    args, model = build()
    state = model.state_dict()
    rows = links(GPT_OSS.meta_names(args), {name: tuple(t.shape) for name, t in state.items()})
    stored = to_external(rows, state)
    mlp1 = stored["layers.0.moe.experts.mlp1_weight"]
    assert torch.equal(mlp1[:, 0::2], state["layers.0.moe.experts.w1"])
    assert torch.equal(mlp1[:, 1::2], state["layers.0.moe.experts.w3"])


def test_alternating_tensors_must_be_several_of_one_shape():
    with pytest.raises(ValueError, match="expected several"):
        Row("a", "b", alternating=True)
    with pytest.raises(ValueError, match="a \\(2,\\), b \\(3,\\) alternate.*expected equal shapes"):
        links((Row(("a", "b"), "c", alternating=True),), {"a": (2,), "b": (3,)})


def quantized_files(folder, args, model):
    """Replace the experts in the files by random MXFP4 experts. Return the tensors."""
    export(folder, args, model, torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in list(stored):
        if name.endswith("_proj"):
            experts, width, rows = stored.pop(name).shape
            shape = (experts, rows, width // 32)
            stored[f"{name}_blocks"] = torch.randint(
                0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
            )
            stored[f"{name}_scales"] = torch.randint(
                0, 250, shape, generator=generator, dtype=torch.uint8
            )
    save_file(stored, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return stored


@pytest.mark.parametrize("max_elements", [2**22, 500])
def test_mxfp4_weights_equal_transformers(tmp_path, monkeypatch, max_elements):
    """All 4-bit values, and scales from the smallest to the largest; in one box and in many."""
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    monkeypatch.setattr(hf_load, "MAX_ELEMENTS", max_elements)
    args, model = build()
    stored = quantized_files(tmp_path, args, model)
    _, loaded_model = build(seed=1)
    report = load(tmp_path, args, loaded_model, quantized=True)
    assert report.unused == ()
    export(tmp_path / "again", args, loaded_model, torch.bfloat16)
    actual = load_file(tmp_path / "again/model.safetensors")
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            expected = convert(tensor, stored[f"{weight}_scales"])
            assert torch.equal(actual.pop(weight), expected), name
            assert expected.unique().numel() > 500
        elif not name.endswith("_scales"):
            assert torch.equal(actual.pop(name), tensor), name
    assert not actual


def test_mxfp4_weights_need_a_setting_and_whole_blocks(tmp_path):
    args, model = build()
    stored = quantized_files(tmp_path, args, model)
    with pytest.raises(CheckpointError, match="MXFP4 weights.*in_hf_quantized = true"):
        load(tmp_path, args, model)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    stored[name] = stored[name][:, :-1].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj_blocks.*Expected uint8 blocks of 16"):
        load(tmp_path, args, model, quantized=True)


def test_a_read_of_some_blocks_reads_only_these(tmp_path, monkeypatch):
    args, model = build()
    quantized_files(tmp_path, args, model)
    source = safetensors_source.open_safetensors(tmp_path, quantized=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.empty(3, 64, 192)
    source.fill([Read(name, ((0, 3, 1), (0, 64, 1), (0, 192, 1)), whole)])
    boxes = []
    read_box = safetensors_source.read_box

    def traced_read_box(file, chunk, dtype, box):
        boxes.append(box)
        return read_box(file, chunk, dtype, box)

    monkeypatch.setattr(safetensors_source, "read_box", traced_read_box)
    part = torch.empty(1, 10, 4)
    source.fill([Read(name, ((1, 1, 1), (40, 10, 1), (7, 4, 2)), part)])
    assert torch.equal(part, whole[1:2, 40:50, 7:14:2])
    assert boxes == [
        ((1, 1, 1), (7, 7, 1), (1, 1, 1)),
        ((1, 1, 1), (7, 7, 1), (1, 1, 1), (0, 16, 1)),
    ]


def test_values_of_one_block():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    blocks = torch.tensor([i + 16 * ((i + 1) % 16) for i in range(16)], dtype=torch.uint8)
    actual = quantized.dequantize(blocks[None], torch.tensor([128], dtype=torch.uint8))
    expected = [2 * values[i % 16] for n in range(16) for i in (n, n + 1)]
    assert actual.tolist() == expected


def test_the_published_config_equals_the_flavor(tmp_path):
    """The keys of openai/gpt-oss-20b's config.json that describe the model."""
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    args = resolve_args(GPT_OSS, "20b", {})
    assert config_differences(tmp_path, GPT_OSS.hf_config(args)) == []
    args = resolve_args(GPT_OSS, "20b", {"sliding_window_size": 64})
    (difference,) = config_differences(tmp_path, GPT_OSS.hf_config(args))
    assert "sliding_window = 128, this model has 64" in difference
