"""Published checkpoints of the Hub: sizes from config.json, transformers' logits, exports, refusals."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.harness.hf_weights import load_hf
from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.hf.folder import write_model
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.dense.hf import hf_args
from torchtitan_like.models.spec import standard_hf_config

HF = get_spec("hf")
# name -> {"config": the published fields, "billions": parameters, unless it is not supported}
PUBLISHED = json.loads((Path(__file__).parents[2] / "assets/hf_configs.json").read_text())
SUPPORTED = [name for name, entry in PUBLISHED.items() if "billions" in entry]
REFUSED = [name for name in PUBLISHED if name not in SUPPORTED]
NUM_TOKENS = 48


def published(name, **changes):
    return {**PUBLISHED[name]["config"], **changes}


def args_of(config, **overrides):
    model = hf_args(config)
    return resolve_args(HF, model.flavor, {**model.args, **overrides})


def problems_of(config):
    with pytest.raises(ValueError) as error:
        hf_args(config)
    return str(error.value).splitlines()


def shrink(config):
    """Return a small config: the same proportions, and lengths that 48 tokens exceed."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    wide = heads * config.get("head_dim", config["hidden_size"] // heads)
    small_kv_heads = kv_heads if kv_heads in (2, 3, 5) else 2
    small_heads = heads // kv_heads * small_kv_heads
    head_dim = 16 if wide // heads % 8 == 0 else 20
    dim = small_heads * head_dim * config["hidden_size"] // wide
    small = {
        "num_attention_heads": small_heads,
        "hidden_size": dim,
        "intermediate_size": dim * config["intermediate_size"] // config["hidden_size"],
        "num_hidden_layers": 2,
        "vocab_size": 96 + config["vocab_size"] % 8,
        "torch_dtype": "float32",
    }
    if "num_key_value_heads" in config:
        small["num_key_value_heads"] = small_kv_heads
    if "head_dim" in config:
        small["head_dim"] = head_dim
    if "max_window_layers" in config:
        small["max_window_layers"] = 2
    if config.get("sliding_window"):
        small["sliding_window"] = 8
    scaling = config.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    small["max_position_embeddings"] = 16 * config["max_position_embeddings"] // original
    if "original_max_position_embeddings" in scaling:
        small["rope_scaling"] = {**scaling, "original_max_position_embeddings": 16}
    return {**config, **small}


def transformers_model(folder, config):
    """Write config.json and random weights to `folder`; return the model of transformers."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.add_(0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(weight.shape[-1] ** -0.5 * noise)
    model.save_pretrained(folder)
    return model.eval()


def build(args):
    with torch.device("meta"):
        model = HF.build(args)
    materialize(model, torch.device("cpu"))
    initialize(model, HF.init_table(args), 0)
    return model


def load(folder, args):
    """Return our model with the weights in `folder`."""
    model = build(args)
    load_hf(
        folder,
        model.state_dict(),
        rows=HF.hf_names(args),
        tied=HF.tied(args),
        quantized=False,
        group=with_checkpoint_errors(HostGroup.alone()),
    )
    return model


def differences_from(folder, args):
    return config_differences(folder, HF.hf_config(args), partial(standard_hf_config, HF))


def logits_of(model, num_tokens=NUM_TOKENS):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (2, num_tokens), generator=generator)
    with torch.no_grad():
        output = model(tokens)
    return getattr(output, "logits", output)


def check_both_ways(folder, config, num_tokens=NUM_TOKENS):
    """Compare logits with transformers, export, and load the export there. Returns sizes and logits.

    The tables have rows for all tokens, also where config.json names a shorter context.
    """
    transformers = pytest.importorskip("transformers")
    theirs = transformers_model(folder / "published", config)
    reference = logits_of(theirs, num_tokens)
    assert reference.std() > 0.3
    saved = json.loads((folder / "published/config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved
    (folder / "published/config.json").write_text(json.dumps(config))
    args = args_of(config)
    assert args_of(saved) == args, "the spelling of transformers 5"
    longer = replace(args, max_seq_len=max(num_tokens, args.max_seq_len))
    model = load(folder / "published", longer)
    assert (logits_of(model, num_tokens) - reference).abs().max() <= 1e-5
    assert not differences_from(folder / "published", args)

    assets = folder / "published"
    identity = Identity(HF, args, assets, assets, special_tokens=lambda: (None, None))
    group = with_checkpoint_errors(HostGroup.alone())
    (folder / "export").mkdir()
    write_model(folder / "export", model.state_dict(), identity, group, dtype=None)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "export", output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert not any(report.values()), report
    assert torch.equal(logits_of(again.eval(), num_tokens), reference)
    exported = json.loads((folder / "export/config.json").read_text())
    assert args_of(exported) == args
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert (key in exported) == (key in config)
        assert exported.get(key) == config.get(key)
    return args, reference


# ---- the published checkpoints


def test_the_list_is_complete():
    assert (len(SUPPORTED), len(REFUSED)) == (34, 14)


@pytest.mark.parametrize("name", SUPPORTED)
def test_published_sizes(name):
    """The number of parameters equals the published number and the number in a built model."""
    args = args_of(published(name))
    assert f"{HF.num_params(args) / 1e9:.3f}" == PUBLISHED[name]["billions"]
    with torch.device("meta"):
        model = HF.build(replace(args, n_layers=2, max_seq_len=1))
    two_layers = sum(parameter.numel() for parameter in model.parameters())
    assert two_layers == HF.num_params(replace(args, n_layers=2))
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in HF.sharding) == 1, name
        assert any(fnmatchcase(name, pattern) for pattern, _ in HF.init_table(args)), name


@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_equal_transformers_and_exports_load_back(name, tmp_path):
    args, reference = check_both_ways(tmp_path, shrink(published(name)))
    plain = replace(args, rope_type="default", rope_attention_factor=1.0, sliding_window_size=0)
    if plain != args:
        model = load(tmp_path / "published", replace(plain, max_seq_len=NUM_TOKENS))
        difference = (logits_of(model) - reference).abs().max()
        is_default = args.rope_type == "default" and not args.sliding_window_size
        assert is_default or difference > 1e-3, "expected the window or the scaling to matter"


# name -> the fields of which at least these are named
REASONS = {
    "internlm/internlm2_5-7b": ['model_type = "internlm2"', "wqkv"],
    "internlm/internlm3-8b-instruct": ['model_type = "internlm3"'],
    "ibm-granite/granite-3.3-8b-instruct": [
        'model_type = "granite"',
        "embedding_multiplier = 12.0",
        "attention_multiplier = 0.0078125",
        "residual_multiplier = 0.22",
        "logits_scaling = 16.0",
    ],
    "ibm-granite/granite-3.3-2b-instruct": ["attention_multiplier = 0.015625"],
    "openbmb/MiniCPM-2B-sft-bf16": [
        "scale_emb = 12",
        "scale_depth = 1.4",
        "dim_model_base = 256",
    ],
    "openbmb/MiniCPM4-8B": ["scale_emb = 12", 'rope_scaling.rope_type = "longrope"'],
    "HuggingFaceTB/SmolLM3-3B": ["no_rope_layers = [1, 1, 1, 0"],
    "microsoft/Phi-3-mini-4k-instruct": ['model_type = "phi3"', "qkv_proj and gate_up_proj"],
    "microsoft/Phi-3.5-mini-instruct": ["qkv_proj", 'rope_scaling.rope_type = "longrope"'],
    "google/gemma-2-2b-it": [
        "attn_logit_softcapping = 50.0",
        "final_logit_softcapping = 30.0",
        "query_pre_attn_scalar = 256",
        'hidden_act = "gelu_pytorch_tanh"',
        "1 + weight",
    ],
    "google/gemma-2-9b-it": ['model_type = "gemma2"'],
    "allenai/OLMo-2-1124-7B": ['model_type = "olmo2"', "normalizes the outputs"],
    "XiaomiMiMo/MiMo-7B-Base": ['model_type = "mimo"', "num_nextn_predict_layers = 1"],
    "Ministral-3-3B-2512": ["text_config", "rope_parameters.llama_4_scaling_beta = 0.1"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_their_fields(name):
    problems = problems_of(published(name))
    assert any(line.startswith("model_type = ") for line in problems)
    for reason in REASONS[name]:
        assert any(reason in line for line in problems), reason


# ---- features that no published file has


FEATURES = {
    "dynamic": ("meta-llama/Llama-2-7b-hf", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "biases": ("codellama/CodeLlama-7b-hf", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases": ("Qwen/Qwen3-8B", {"attention_bias": True}),
    "windows from layer 1": (
        "Qwen/Qwen3-0.6B",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "windows in all layers": (
        "Qwen/Qwen2.5-7B-Instruct",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ),
    "yarn with all keys": (
        "Qwen/Qwen2.5-0.5B",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "attention_factor": 0.75,
                "truncate": False,
            }
        },
    ),
    "yarn with two scales": (
        "Qwen/Qwen3-0.6B",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
            }
        },
    ),
    "yarn of the whole context": (
        "codellama/CodeLlama-7b-hf",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ),
    "llama3 of a mistral": (
        "mistralai/Mistral-7B-v0.1",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_no_published_file(feature, tmp_path):
    name, changes = FEATURES[feature]
    check_both_ways(tmp_path, {**shrink(published(name)), "num_hidden_layers": 3, **changes})


@pytest.mark.parametrize("num_tokens", [12, 16, 17, 40])
def test_dynamic_frequencies_depend_on_the_length(num_tokens, tmp_path):
    """Up to max_position_embeddings = 16 they are the plain ones."""
    name, changes = FEATURES["dynamic"]
    args, reference = check_both_ways(tmp_path, {**shrink(published(name)), **changes}, num_tokens)
    plain = load(tmp_path / "published", replace(args, rope_type="default", max_seq_len=40))
    difference = (logits_of(plain, num_tokens) - reference).abs().max()
    assert difference <= 1e-5 if num_tokens <= 16 else difference > 1e-3


def test_dynamic_frequencies_need_whole_sequences():
    args = args_of(shrink(published(FEATURES["dynamic"][0], **FEATURES["dynamic"][1])))
    positions = torch.arange(24)[None]
    with pytest.raises(ValueError, match="expected whole sequences beyond 16 tokens"):
        build(replace(args, max_seq_len=24))(positions, None, positions)
    build(replace(args, max_seq_len=16))(positions[:, :16], None, positions[:, :16])
    with pytest.raises(ValueError, match="longer than max_seq_len = 16"):
        build(replace(args, max_seq_len=16))(positions)


def test_a_window_ends_at_document_borders():
    """Two documents in one sample give the logits that each gives alone."""
    config = shrink(published("mistralai/Mistral-7B-v0.1"))
    args = args_of(config, attn_mask_type="block_causal", max_seq_len=30)
    model = build(args).double()
    tokens = torch.arange(30)[None]
    positions = torch.cat([torch.arange(17), torch.arange(13)])[None]
    with torch.no_grad():
        together = model(tokens, None, positions)
        parts = [model(part) for part in tokens.split([17, 13], dim=1)]
    assert (together - torch.cat(parts, dim=1)).abs().max() <= 1e-12


def test_windows_bound_the_flops():
    args = args_of(published("mistralai/Mistral-7B-v0.1"))
    products = 6 * (HF.num_params(args) - 32000 * 4096)
    assert HF.flops_per_token(args, 4096) == products + 6 * 32 * 32 * 256 * 4096
    assert HF.flops_per_token(args, 8192) == HF.flops_per_token(args, 4096)
    later = replace(args, architecture="qwen2", first_window_layer=31)
    assert HF.flops_per_token(later, 8192) - HF.flops_per_token(later, 4096) == (
        6 * 31 * 32 * 256 * 4096
    )


def test_an_unreadable_config_next_to_the_tokenizer_ends_an_export(tmp_path):
    (tmp_path / "config.json").write_text("{")
    args = args_of(shrink(LLAMA))
    identity = Identity(HF, args, tmp_path, tmp_path, special_tokens=lambda: (None, None))
    (tmp_path / "export").mkdir()
    group = with_checkpoint_errors(HostGroup.alone())
    with pytest.raises(CheckpointError, match="config.json is not valid"):
        write_model(tmp_path / "export", build(args).state_dict(), identity, group, dtype=None)


def test_a_loaded_folder_with_other_sizes_is_reported(tmp_path):
    args = args_of(LLAMA)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": LINEAR}))
    (line,) = differences_from(tmp_path, args)
    assert "has rope_scaling = {'rope_type': 'linear', 'factor': 4.0}, this model has None" in line
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "scale_emb": 12}))
    (line,) = differences_from(tmp_path, args)
    assert "has scale_emb = 12: expected no such field or 1" in line


# ---- traps of these files


LLAMA = published("meta-llama/Llama-2-7b-hf")
MISTRAL = published("mistralai/Mistral-7B-v0.1")
QWEN2 = published("Qwen/Qwen2.5-7B-Instruct")
LINEAR = {"rope_type": "linear", "factor": 4.0}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_two_spellings_of_rope():
    old = {**LLAMA, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {**without(LLAMA, "rope_scaling"), "rope_parameters": {**LINEAR, "rope_theta": 1e4}}
    assert args_of(old) == args_of(new) == args_of({**old, **new})
    assert args_of(old).rope_type == "linear"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 2.0}},
            'rope_parameters = {"rope_type": "linear", "factor": 2.0}: expected rope_scaling = ',
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters.rope_theta = 500000.0: expected rope_theta = 10000.0; two spellings",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 2.0}},
            'rope_scaling.type = "dynamic": expected rope_type = "linear"',
        ),
        (
            {
                "original_max_position_embeddings": 2048,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 4096,
                },
            },
            "original_max_position_embeddings = 2048: expected rope_scaling.original_max",
        ),
    ],
)
def test_spellings_that_disagree_are_refused(changes, expected):
    (problem,) = problems_of({**LLAMA, **changes})
    assert expected in problem


def test_integers_are_numbers():
    args = args_of({**LLAMA, "rope_theta": 130000, "rope_scaling": {"type": "linear", "factor": 4}})
    assert (args.rope_theta, args.rope_factor) == (130000.0, 4.0)
    assert isinstance(args.rope_theta, float) and isinstance(args.rope_factor, float)


def test_linear_scaling_does_not_read_the_length():
    """It is the length before scaling in some files, and after scaling in others."""
    before, after = (
        {**LLAMA, "max_position_embeddings": length, "rope_scaling": LINEAR}
        for length in (4096, 16384)
    )
    assert replace(args_of(before), max_seq_len=16384) == replace(
        args_of(after), rope_original_seq_len=4096
    )
    dynamic = args_of({**before, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    longer = replace(dynamic, max_seq_len=16384)
    assert HF.hf_config(longer)["max_position_embeddings"] == dynamic.rope_original_seq_len == 4096


def test_defaults_of_yarn():
    args = args_of(published("NousResearch/Yarn-Llama-2-7b-64k"))
    assert args.rope_attention_factor == pytest.approx(1.2772588722239782)  # 0.1 ln(16) + 1
    assert (args.rope_beta_fast, args.rope_beta_slow, args.rope_truncate) == (32.0, 1.0, True)
    rope = {"type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert args_of({**LLAMA, "rope_scaling": rope}).rope_attention_factor == 1.0
    assert args_of({**LLAMA, "rope_scaling": rope}).rope_original_seq_len == 4096


def test_an_absent_window_is_not_null():
    assert args_of(without(MISTRAL, "sliding_window")).sliding_window_size == 4096
    assert args_of({**MISTRAL, "sliding_window": None}).sliding_window_size == 0


def test_windows_of_qwen_are_off_unless_a_switch_is_on():
    assert args_of(QWEN2).sliding_window_size == 0
    args = args_of({**QWEN2, "use_sliding_window": True, "max_window_layers": 20})
    assert [args.window(layer) for layer in (0, 19, 20, 27)] == [0, 0, 131072, 131072]
    assert args_of({**QWEN2, "use_sliding_window": True}).sliding_window_size == 0  # 28 of 28


def test_biases_without_a_key():
    args = args_of(QWEN2)
    assert args.has_qkv_bias and not args.attention_bias
    both = args_of({**LLAMA, "attention_bias": True})
    assert both.has_qkv_bias and both.attention_bias
    names = [{hf for _, hf in HF.hf_names(each) if hf.endswith("bias")} for each in (args, both)]
    assert names[1] - names[0] == {"model.layers.{}.self_attn.o_proj.bias"}
    assert not names[0] - names[1] and len(names[0]) == 3


def test_head_dim_is_independent_of_the_width():
    assert args_of(published("mistralai/Mistral-Nemo-Base-2407")).head_dim == 128
    assert args_of(without(published("Qwen/Qwen3-0.6B"), "head_dim")).head_dim == 128
    assert args_of({**LLAMA, "head_dim": None}).head_dim == 128
    (problem,) = problems_of({**LLAMA, "num_attention_heads": 30, "num_key_value_heads": 30})
    assert problem.startswith("hidden_size = 4096: expected a multiple of num_attention_heads = 30")


def test_heads_of_keys_that_are_absent_or_null():
    names = {"llama": 32, "mistral": 8, "qwen2": 32, "qwen3": 32}
    for model_type, expected in names.items():
        assert args_of({"model_type": model_type}).n_kv_heads == expected
        null = {"model_type": model_type, "num_key_value_heads": None, "num_attention_heads": 16}
        assert args_of(null).n_kv_heads == 16


def test_defaults_of_classes():
    """An almost empty file has the sizes of transformers' class."""
    transformers = pytest.importorskip("transformers")
    for model_type, flavor in HF.flavors.items():
        args = args_of({"model_type": model_type})
        assert replace(args, attn_type=flavor.attn_type) == flavor
        config = transformers.AutoConfig.for_model(model_type).to_dict()
        assert args_of(config) == args


@pytest.mark.parametrize(
    ("name", "degree", "fits"),
    [
        ("HuggingFaceTB/SmolLM-135M-Instruct", 2, False),
        ("HuggingFaceTB/SmolLM-135M-Instruct", 3, True),
        ("Qwen/Qwen2.5-0.5B", 2, True),
        ("01-ai/Yi-34B", 8, True),
    ],
)
def test_odd_numbers_of_heads_limit_tensor_parallelism(name, degree, fits):
    limits = HF.constraints(args_of(published(name)))
    assert all(limits[heads] % degree == 0 for heads in ("n_heads", "n_kv_heads")) == fits


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("embedding_multiplier", 12.0, 1.0),
        ("residual_multiplier", 0.22, 1.0),
        ("attention_multiplier", 0.0078125, 128**-0.5),
        ("logits_scaling", 16.0, 1),
        ("scale_emb", 12, 1),
        ("scale_depth", 1.4, None),
        ("dim_model_base", 256, None),
        ("attn_logit_softcapping", 50.0, None),
        ("final_logit_softcapping", 30.0, None),
        ("query_pre_attn_scalar", 256, None),
        ("partial_rotary_factor", 0.5, 1.0),
        ("num_nextn_predict_layers", 1, 0),
        ("rope_interleaved", True, False),
        ("hidden_act", "gelu", "silu"),
        ("attention_dropout", 0.1, 0.0),
        ("quantization_config", {"quant_method": "gptq"}, None),
        ("layer_types", ["full_attention", "sliding_attention"] * 16, ["full_attention"] * 32),
        ("no_rope_layers", [1, 1, 1, 0] * 8, [1] * 32),
        ("sliding_window", 4096, None),
        ("architectures", ["LlamaModel"], ["LLaMAForCausalLM"]),
        ("rope_scaling", {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, {}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 1.0}, {"rope_type": "default"}),
        ("rope_scaling", {**LINEAR, "llama_4_scaling_beta": 0.1}, {**LINEAR, "finetuned": True}),
    ],
)
def test_fields_that_change_the_model_are_refused(field, value, neutral):
    (problem,) = problems_of({**LLAMA, field: value})
    assert problem.startswith(field)
    assert hf_args({**LLAMA, field: neutral}).notes == ()


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (MISTRAL, {"attention_bias": True}, "attention_bias = true: expected no such field or fal"),
        (MISTRAL, {"use_sliding_window": False}, "use_sliding_window = false: expected true with"),
        (MISTRAL, {"layer_types": ["full_attention"] * 32}, "layer_types = "),
        (QWEN2, {"attention_bias": False}, "attention_bias = false: expected no such field or tru"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 28}, "expected 28 full_attention, then 0"),
        (QWEN2, {"use_sliding_window": "no"}, 'use_sliding_window = "no": expected true or false'),
        (LLAMA, {"hidden_size": "4096"}, 'hidden_size = "4096": expected an integer above 0'),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: expected at most"),
        (LLAMA, {"vocab_size": 2**60}, "vocab_size = 1152921504606846976: expected at most 214748"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN: expected a number above 0"),
        (LLAMA, {"rope_theta": 10**400}, "0...: expected a number above 0"),
        (LLAMA, {"model_type": ["llama"]}, 'model_type = ["llama"]: expected one of llama'),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = absent: expected a"),
        (LLAMA, {"rope_scaling": {**LINEAR, "factor": 0.5}}, "rope_scaling.factor = 0.5: expected"),
        (LLAMA, {"rope_scaling": "linear"}, 'rope_scaling = "linear": expected null or a table'),
        (LLAMA, {"rope_scaling": {"full_attention": LINEAR}}, "expected one table for all layers"),
        (LLAMA, {"model_type": None}, "model_type = null: expected one of llama, mistral, qwen2"),
    ],
)
def test_values_that_contradict_the_class_are_refused(base, changes, expected):
    problems = problems_of({**base, **changes})
    assert any(expected in problem for problem in problems), problems


def test_unknown_fields_are_reported():
    config = {**LLAMA, "pretraining_tp": 2, "auto_map": {}, "new_norm": 1, "rope_scaling": {**LINEAR, "x": 2}}  # fmt: skip
    (note,) = hf_args(config).notes
    assert note.endswith("need them: new_norm = 1, rope_scaling.x = 2")


def test_edited_copies_are_overridden_by_arguments():
    """Exporters lower max_position_embeddings in their copies of files."""
    copy = published("01-ai/Yi-6B", max_position_embeddings=512)
    assert args_of(copy).max_seq_len == 512
    assert args_of(copy, max_seq_len=4096) == args_of(published("01-ai/Yi-6B"))


def test_the_list_of_unrotated_layers_reads_backwards():
    """An entry of 1 means that the layer is rotated."""
    assert hf_args({**LLAMA, "no_rope_layers": [1] * 32}).notes == ()
    (problem,) = problems_of({**LLAMA, "no_rope_layers": [0] * 32})
    assert problem.startswith("no_rope_layers = [0, 0,")
