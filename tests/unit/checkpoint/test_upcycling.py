"""A dense model starts a mixture of experts: copies, new routers, equal logits, refused sources."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.harness.hf_weights import to_external
from torchtitan_like.checkpoint.errors import CheckpointError, with_checkpoint_errors
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.loading import load_states
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import links

SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "enable_weight_tying": False,
}
DENSE = SIZES | {"hidden_dim": 24}
EXPERTS = SIZES | {"num_experts": 4, "top_k": 2, "moe_inter_dim": 24}


def build(flavor, sizes, seed=0, dtype=torch.float64):
    spec = get_spec("qwen3")
    args = resolve_args(spec, flavor, sizes)
    with torch.device("meta"):
        model = spec.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), seed)
    return args, model


def state_of(model):
    return {name: tensor.detach() for name, tensor in ModelState([model]).state_dict().items()}


def save_hf(folder, flavor="debugmodel", **overrides):
    """Write the safetensors of a dense model, or of another flavor. Returns the model."""
    sizes = DENSE if flavor == "debugmodel" else EXPERTS
    args, model = build(flavor, sizes | overrides, seed=7)
    state = state_of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tied = get_spec("qwen3").tied(args)
    save_file(
        to_external(links(get_spec("qwen3").hf_names(args), shapes, tied), state),
        folder / "model.safetensors",
    )
    return model


def upcycle(folder, args, model, spec=None):
    identity = Identity(spec or get_spec("qwen3"), args, Path(), Path(), lambda: (None, None))
    start = Start("warm", 0, folder, "", format="hf", upcycles=True)
    load_states(
        start, {"model": ModelState([model])}, with_checkpoint_errors(HostGroup.alone()), identity
    )


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_logits_equal_the_dense_models(tmp_path, top_k):
    """The weights of a token's experts sum to 1, and all experts are equal."""
    dense = save_hf(tmp_path)
    args, model = build("debugmodel_moe", EXPERTS | {"top_k": top_k})
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    before = (model(tokens) - dense(tokens)).abs().max()
    upcycle(tmp_path, args, model)
    error = (model(tokens) - dense(tokens)).abs().max()
    assert error <= 1e-12 and before > 1e-2


def test_unnormalized_weights_change_the_logits(tmp_path):
    """The config check therefore warns."""
    dense = save_hf(tmp_path)
    args, model = build("debugmodel_moe", EXPERTS | {"route_norm": False})
    upcycle(tmp_path, args, model)
    tokens = torch.arange(16)[None]
    assert (model(tokens) - dense(tokens)).abs().max() > 1e-4


def test_experts_are_copies_and_routers_are_new(tmp_path, caplog):
    dense = state_of(save_hf(tmp_path))
    args, model = build("debugmodel_moe", EXPERTS | {"load_balance": "bias"})
    initial = {name: tensor.clone() for name, tensor in state_of(model).items()}
    with caplog.at_level("INFO"):
        upcycle(tmp_path, args, model)
    loaded = state_of(model)
    for name, tensor in loaded.items():
        if "moe.router" in name or "expert_bias" in name:
            assert torch.equal(tensor, initial[name]), name
        elif "moe.experts" in name:
            stored = dense[name.replace("moe.experts", "feed_forward") + ".weight"]
            assert all(torch.equal(expert, stored) for expert in tensor), name
            assert len(tensor) == 4
        else:
            assert torch.equal(tensor, dense[name]), name
    assert {name.split(".")[-1] for name in loaded} >= {"w1", "w2", "w3", "expert_bias"}
    assert (
        f"Upcycled {tmp_path}: 6 feed-forward tensors copied to each of 4 experts, "
        "19 other tensors loaded unchanged, routers of 2 layers initialized anew"
    ) in caplog.text


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden_dim": 48},
            "moe_inter_dim = 48 (this run: 24). Expected equal sizes, because "
            "checkpoint.initial_load_upcycle = true copies its feed-forward networks whole. "
            "Set model.args.moe_inter_dim = 48",
        ),
        ({"vocab_size": 128}, "vocab_size = 128 (this run: 64)"),
        ({"dim": 64}, "dim = 64 (this run: 32)"),
        ({"n_layers": 3}, "n_layers = 3 (this run: 2)"),
        ({"n_layers": 1, "dim": 64}, "n_layers = 1 (this run: 2), dim = 64 (this run: 32)"),
        ({"n_heads": 4}, "model.layers.0.self_attn.q_proj.weight is (64, 32), this model needs (32, 32)"),
        ({"enable_weight_tying": True}, "1 missing: lm_head.weight. Set model.flavor"),
    ],
)  # fmt: skip
def test_other_sizes_are_refused_by_name(tmp_path, sizes, message):
    save_hf(tmp_path, **sizes)
    args, model = build("debugmodel_moe", EXPERTS)
    initial = {name: tensor.clone() for name, tensor in state_of(model).items()}
    with pytest.raises(CheckpointError) as error:
        upcycle(tmp_path, args, model)
    assert message in str(error.value)
    assert all(torch.equal(tensor, initial[name]) for name, tensor in state_of(model).items())


def test_published_sizes_are_refused_with_the_setting_that_fits(tmp_path):
    """Qwen3-0.6B has 3,072 hidden units, an expert of 30B-A3B has 768."""
    save_hf(tmp_path, hidden_dim=3072)
    args, model = build("debugmodel_moe", EXPERTS | {"moe_inter_dim": 768})
    with pytest.raises(CheckpointError, match=r"3072 \(this run: 768\).*moe_inter_dim = 3072"):
        upcycle(tmp_path, args, model)


def test_a_model_with_experts_is_refused(tmp_path):
    save_hf(tmp_path, flavor="debugmodel_moe")
    args, model = build("debugmodel_moe", EXPERTS)
    with pytest.raises(CheckpointError, match="Expected a dense model .*initial_load_upcycle = f"):
        upcycle(tmp_path, args, model)


@pytest.mark.parametrize(
    ("name", "flavor", "reason"),
    [
        ("deepseek_v3", "671B", "no dense model has its latent attention"),
        ("gpt_oss", "20b", "no dense model has its attention sinks and biased experts"),
        ("llama3", "8B", "the family has no mixture of experts"),
        ("qwen3", "8B", "num_experts = 0: the model has no experts"),
    ],
)
def test_the_error_explains_why_a_family_has_no_dense_source(tmp_path, name, flavor, reason):
    spec = get_spec(name)
    args = spec.flavors[flavor]
    assert spec.upcycling(args) == reason
    with pytest.raises(CheckpointError, match=reason):
        upcycle(tmp_path, args, torch.nn.Linear(1, 1), replace(spec))
