"""Exports and loads of models with experts: separate or fused experts, float8, fp32 biases."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hf_weights import load_hf, to_external
from tests.unit.checkpoint.test_hf_load import quantize
from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.cli import main
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import links

DEEPSEEK = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "inter_dim": 48,
    "moe_inter_dim": 24,
    "vocab_size": 64,
    "max_seq_len": 32,
    "num_experts": 4,
    "top_k": 2,
    "score_func": "sigmoid",
    "route_norm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
QWEN = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "top_k": 2,
    "moe_inter_dim": 24,
}
MODELS = {"deepseek_v3": ("debugmodel", DEEPSEEK), "qwen3": ("debugmodel_moe", QWEN)}


def build(name="deepseek_v3", dtype=torch.float32, seed=0, **overrides):
    spec = get_spec(name)
    flavor, sizes = MODELS[name]
    args = resolve_args(spec, flavor, sizes | overrides)
    with torch.device("meta"):
        model = spec.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), seed)
    generator = torch.Generator().manual_seed(seed)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("expert_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return spec, args, model


def state_of(model):
    return {name: tensor.detach() for name, tensor in ModelState([model]).state_dict().items()}


def stored_tensors(rows, model):
    state = state_of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return to_external(links(rows, shapes), state)


def load(folder, spec, args, model, quantized=False):
    return load_hf(
        folder,
        state_of(model),
        rows=spec.hf_names(args),
        tied=spec.tied(args),
        quantized=quantized,
        group=with_checkpoint_errors(HostGroup.alone()),
        alternative_rows=spec.hf_alternative_names(args),
        unread=spec.hf_unread(args),
    )


def assert_equal_states(actual, expected):
    expected_state = state_of(expected)
    for name, tensor in state_of(actual).items():
        assert tensor.dtype == expected_state[name].dtype, name
        assert torch.equal(tensor, expected_state[name]), name


def export(folder, spec, args, model, dtype):
    return write_export(
        folder,
        state_of(model),
        rows=spec.hf_names(args),
        tied=spec.tied(args),
        dtype=dtype,
        group=HostGroup.alone(),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_read_back_bit_for_bit(tmp_path, name, dtype):
    spec, args, model = build(name, dtype)
    export(tmp_path, spec, args, model, dtype)
    _, _, loaded_model = build(name, dtype, seed=1)
    load(tmp_path, spec, args, loaded_model)
    assert_equal_states(loaded_model, model)


def test_the_bias_of_an_export_in_half_precision_is_float32(tmp_path):
    """bfloat16 would round a bias of 1.001 to 1."""
    spec, args, model = build()
    bias = model.layers["1"].moe.expert_bias
    bias.fill_(1.001)
    export(tmp_path, spec, args, model, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(stored.pop(name), bias)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", MODELS)
def test_fused_experts_are_read(tmp_path, name):
    """transformers stacks all experts of a layer and concatenates gate and up projections."""
    spec, args, model = build(name)
    stored = stored_tensors(spec.hf_alternative_names(args), model)
    gate_up = stored["model.layers.1.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (4, 48, 32)
    assert torch.equal(gate_up[2, 24:], model.layers["1"].moe.experts.w3[2])
    save_file(stored, tmp_path / "model.safetensors")
    _, _, loaded_model = build(name, seed=1)
    report = load(tmp_path, spec, args, loaded_model)
    assert report.unused == ()
    assert_equal_states(loaded_model, model)


def write_float8(folder, spec, args, model):
    """Write projections in blocks of 128 x 128 and no other tensors, like DeepSeek's files.

    Returns the dequantized tensors by name.
    """
    stored = stored_tensors(spec.hf_names(args), model)
    expected = dict(stored)
    for name in list(stored):
        if "proj" in name:
            values, scales, dequantized = quantize(stored[name] * 50, (128, 128))
            stored |= {name: values, f"{name}_scale_inv": scales}
            expected[name] = dequantized
    save_file(stored, folder / "model.safetensors")
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": method}))
    return expected


def test_float8_experts_are_dequantized(tmp_path):
    spec, args, model = build(dim=160, moe_inter_dim=136, inter_dim=136)
    expected = write_float8(tmp_path, spec, args, model)
    _, _, loaded_model = build(dim=160, moe_inter_dim=136, inter_dim=136, seed=1)
    report = load(tmp_path, spec, args, loaded_model, quantized=True)
    assert report.unused == ()
    loaded = stored_tensors(spec.hf_names(args), loaded_model)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_the_multi_token_prediction_layer_is_skipped(tmp_path, caplog):
    """Only layer 61 of the model with 61 layers is skipped. Other extra tensors are an error."""
    spec, args, model = build(n_layers=61, dim=8, moe_inter_dim=8, inter_dim=8)
    stored = stored_tensors(spec.hf_names(args), model)
    surplus = {f"model.layers.61.{i}.weight": torch.ones(2) for i in range(9)}
    save_file(stored | surplus, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        report = load(tmp_path, spec, args, model)
    assert set(report.unused) == surplus.keys()
    assert "not used: 9 tensors, such as model.layers.61." in caplog.text
    save_file(stored | {"model.layers.62.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 not in this model: model\.layers\.62"):
        load(tmp_path, spec, args, model)


def test_the_last_layer_of_a_larger_model_is_not_skipped(tmp_path):
    spec, args, model = build(n_layers=3)
    save_file(stored_tensors(spec.hf_names(args), model), tmp_path / "model.safetensors")
    _, smaller_args, smaller = build()
    with pytest.raises(CheckpointError, match=r"not in this model: model\.layers\.2"):
        load(tmp_path, spec, smaller_args, smaller)


@pytest.mark.parametrize("is_nested", [False, True], ids=["transformers 4", "transformers 5"])
def test_both_spellings_of_yarn_are_the_same_config(tmp_path, is_nested):
    spec, args, _ = build()

    def write_config(factor):
        config = spec.hf_config(args)
        scaling = config.pop("rope_scaling") | {"factor": factor}
        if is_nested:
            scaling["rope_type"] = scaling.pop("type")
            scaling["rope_theta"] = config.pop("rope_theta")
        config["rope_parameters" if is_nested else "rope_scaling"] = scaling
        (tmp_path / "config.json").write_text(json.dumps(config))

    write_config(factor=40.0)
    assert config_differences(tmp_path, spec.hf_config(args)) == []
    write_config(factor=4.0)
    (line,) = config_differences(tmp_path, spec.hf_config(args))
    assert "has rope_scaling = " in line


def test_a_conversion_to_half_precision_keeps_biases_in_float32(tmp_path, capsys):
    spec, args, model = build()
    model.layers["1"].moe.expert_bias.fill_(1.001)
    (tmp_path / "hf").mkdir()
    save_file(stored_tensors(spec.hf_names(args), model), tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/config.json").write_text(json.dumps(spec.hf_config(args)))
    command = ["ckpt", "export", str(tmp_path / "hf"), str(tmp_path / "bf16")]
    assert main([*command, "--to", "hf", "--dtype", "bfloat16"]) == 0, capsys.readouterr()
    stored = load_file(tmp_path / "bf16/model.safetensors")
    bias = stored.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    assert torch.equal(bias, model.layers["1"].moe.expert_bias)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
