"""Qwen3 with experts: the published sizes and Hugging Face's numbers, gradients, and files."""

import random

import pytest
import torch

from tests.harness.hf_weights import to_ours
from tests.unit.models import test_qwen3
from tests.unit.models.test_qwen3 import QWEN, UNTIED, hf_state, shapes_of, some_tokens
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.models import resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.models.qwen3.flavors import num_active_params

EXPERTS = {"num_experts": 8, "top_k": 2, "moe_inter_dim": 32, **UNTIED}


def build(overrides=None):
    return test_qwen3.build(EXPERTS | (overrides or {}))


def perturb(model):
    """Make scores and hidden units differ widely, so that a wrong expert or weight shows in the logits."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            elif "router" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
            elif "layers" in name:
                weight.mul_(3)


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("30B-A3B", 30_532_122_624, 3_353_032_704, 27.914883072),
        ("235B-A22B", 235_093_634_560, 22_190_763_520, 167.26000128),
        ("debugmodel_moe", 315_758_848, 51_517_696, 1.111266816),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The two totals are those of transformers' models of these sizes."""
    args = resolve_args(QWEN, flavor, {})
    with torch.device("meta"):
        model = QWEN.build(args)
    assert QWEN.num_params(args) == total == sum(p.numel() for p in model.parameters())
    others = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert num_active_params(args) == active == total - others * (args.num_experts - args.top_k) // args.num_experts
    assert QWEN.flops_per_token(args, 4096) == pytest.approx(gflops * 1e9, rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"num_experts": -1}, "num_experts = -1: expected 0 for a dense model"),
        ({"top_k": 9, "num_experts": 8}, "top_k = 9: expected 1 to num_experts = 8"),
        ({"top_k": 0}, "top_k = 0: expected 1 to num_experts = 64"),
        ({"moe_inter_dim": 0}, "moe_inter_dim = 0: expected a number above 0"),
    ],
)
def test_a_wrong_size_is_named(overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(QWEN, "debugmodel_moe", overrides)
    assert expected in str(error.value)


def random_sizes(seed):
    choose = random.Random(seed).choice
    num_experts = choose([2, 5, 8, 16])
    return {
        "n_layers": choose([1, 2, 3]),
        "n_kv_heads": choose([1, 2, 4]),
        "num_experts": num_experts,
        "top_k": choose([1, 2, num_experts]),
        "moe_inter_dim": choose([24, 32, 64]),  # transformers' experts need rows of 16 bytes
        "route_norm": choose([True, False]),
        "enable_weight_tying": choose([True, False]),
        "norm_eps": choose([1e-6, 1e-3]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_logits_and_gradients_equal_transformers(seed):
    transformers = pytest.importorskip("transformers")
    args, model = build(random_sizes(seed))
    perturb(model)
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN.hf_config(args)))
    load_per_expert(theirs, hf_state(args, model))
    tokens = some_tokens(args, seq=33)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits, reference = model(inputs), theirs(inputs).logits
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() <= 1e-5
    model(inputs, labels).backward()
    torch.nn.functional.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    pairs = links(QWEN.hf_names(args), shapes_of(model), QWEN.tied(args))
    expected = to_ours(pairs, gradients_per_expert(theirs), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        scale = expected[name].norm()
        if "router" in name and args.top_k == 1 and args.route_norm:
            continue  # one normalized weight is 1, whatever its score is
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * scale, name


def load_per_expert(theirs, stored):
    """Load tensors with the names of the files into a module that stacks its experts."""
    state = theirs.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensor.copy_(stacked(name, stored, tensor.shape[0]))
            elif name in stored:
                tensor.copy_(stored[name])
    theirs.tie_weights()


def stacked(name, stored, num_experts):
    prefix, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return torch.stack([stored[f"{prefix}.{e}.down_proj.weight"] for e in range(num_experts)])
    return torch.stack(
        [
            torch.cat([stored[f"{prefix}.{e}.{half}_proj.weight"] for half in ("gate", "up")])
            for e in range(num_experts)
        ]
    )


def gradients_per_expert(theirs):
    """Return the gradients by the names of the files."""
    result = {}
    for name, parameter in theirs.named_parameters():
        prefix, _, kind = name.rpartition(".")
        for e, grad in enumerate(parameter.grad) if ".experts." in name else ():
            if kind == "down_proj":
                result[f"{prefix}.{e}.down_proj.weight"] = grad
            else:
                gate, up = grad.chunk(2)
                result |= {f"{prefix}.{e}.gate_proj.weight": gate, f"{prefix}.{e}.up_proj.weight": up}
        if ".experts." not in name:
            result[name] = parameter.grad
    return result


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, tied):
    """Nothing is missing or unexpected, sizes and logits are equal."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    args, model = build({"vocab_size": 2048, "enable_weight_tying": tied})
    perturb(model)
    save_file(hf_state(args, model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assets = repo_root / "tests/assets/tokenizer"
    write_folder(tmp_path, config=QWEN.hf_config(args), dtype=torch.float32, assets=assets, bos=None, eos=None)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype="auto")
    assert isinstance(theirs, transformers.Qwen3MoeForCausalLM)
    assert not any(report.values()), report
    assert theirs.config.num_experts_per_tok == args.top_k and theirs.config.norm_topk_prob is args.route_norm
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5
