"""Exports and loads of Llama 4: fused experts, and the published files with a vision model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.family import Family
from tests.harness.hf_weights import to_external
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.models.hf_table import count_named, links

SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "vocab_size": 32,
    "multiple_of": 8,
    "num_experts": 3,
    "max_seq_len": 64,
}


FAMILY = Family("llama4", "debugmodel_irope", SIZES)
LLAMA4, build, export, load = FAMILY.spec, FAMILY.build, FAMILY.export, FAMILY.load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_read_back_bit_for_bit(tmp_path, dtype):
    FAMILY.assert_an_export_is_read_back(tmp_path, dtype)


def test_gate_projections_precede_up_projections(tmp_path):
    args, model = build()
    export(tmp_path, args, model, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    experts = model.layers["1"].moe.experts
    width = args.moe_inter_dim
    gate_up = stored["model.layers.1.feed_forward.experts.gate_up_proj"]
    assert gate_up.shape == (3, 32, 2 * width)
    assert torch.equal(gate_up[2, :, 5], experts.w1[2, 5])
    assert torch.equal(gate_up[2, :, width + 5], experts.w3[2, 5])
    down = stored["model.layers.1.feed_forward.experts.down_proj"]
    assert torch.equal(down[1].T, experts.w2[1])


def published_files(folder, args, model):
    """Write the model as the text model of a model with vision."""
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    stored = to_external(links(LLAMA4.hf_alternative_names(args), shapes), state)
    assert all(name.startswith("language_model.") for name in stored)
    stored["vision_model.class_embedding"] = torch.zeros(8)
    stored["multi_modal_projector.linear_1.weight"] = torch.zeros(8, 8)
    save_file(stored, folder / "model.safetensors")
    return stored


def test_the_text_model_of_a_model_with_vision_is_read(tmp_path):
    args, model = build()
    stored = published_files(tmp_path, args, model)
    _, loaded_model = build(seed=1)
    report = load(tmp_path, args, loaded_model)
    assert set(report.unused) == {name for name in stored if "language_model" not in name}
    FAMILY.assert_equal_states(loaded_model, model)


def test_other_surplus_tensors_are_refused(tmp_path):
    args, model = build()
    stored = published_files(tmp_path, args, model)
    stored["language_model.model.layers.2.input_layernorm.weight"] = torch.ones(32)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 not in this model: language_model.model.layers.2"):
        load(tmp_path, args, model)


@pytest.mark.nightly
def test_transformers_stores_the_names_of_this_table():
    transformers = pytest.importorskip("transformers")
    args, model = build()
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
    text = LLAMA4.hf_config(args) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    with torch.device("meta"):
        names = transformers.Llama4ForConditionalGeneration(config).state_dict().keys()
        text_names = transformers.Llama4ForCausalLM(config.text_config).state_dict().keys()
    in_text = [name for name in names if name.startswith("language_model.")]
    assert count_named(LLAMA4.hf_alternative_names(args), names) == len(in_text) > 0
    assert count_named(LLAMA4.hf_names(args), text_names) == len(text_names) == len(in_text)


@pytest.mark.parametrize("has_vision", [False, True])
def test_differences_from_a_stored_config_are_reported(tmp_path, has_vision):
    args, _ = build()
    config = LLAMA4.hf_config(args) | {"attention_chunk_size": 8192}
    stored = {"model_type": "llama4", "text_config": config} if has_vision else config
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (difference,) = config_differences(tmp_path, LLAMA4.hf_config(args))
    assert "attention_chunk_size = 8192, this model has 256" in difference
