"""Qwen3 with experts: the published sizes and Hugging Face's numbers, gradients, and files."""

import random

import pytest
import torch

from tests.harness.hf_weights import gradients_per_expert, load_per_expert, to_native
from tests.unit.models import test_qwen3
from tests.unit.models.test_qwen3 import QWEN, UNTIED, hf_state, shapes_of, some_tokens
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.models import resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.models.layers.moe import Router
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
    """The two totals equal transformers' models of these sizes."""
    args = resolve_args(QWEN, flavor, {})
    with torch.device("meta"):
        model = QWEN.build(args)
    assert QWEN.num_params(args) == total == sum(p.numel() for p in model.parameters())
    others = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert (
        num_active_params(args)
        == active
        == total - others * (args.num_experts - args.top_k) // args.num_experts
    )
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
def test_the_error_names_a_wrong_size(overrides, expected):
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


CELLS = [pytest.param(seed, marks=[pytest.mark.nightly] if seed >= 8 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, seed):
    transformers = pytest.importorskip("transformers")
    args, model = build(random_sizes(seed))
    perturb(model)
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN.hf_config(args)))
    load_per_expert(theirs, hf_state(args, model))
    tokens = some_tokens(args, seq=33)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    chosen, scores, expected_ids = [], [], []
    select = Router.select

    def traced_select(router, logits, expert_bias):
        scores.append(logits.softmax(-1))
        chosen.append(select(router, logits, expert_bias))
        return chosen[-1]

    monkeypatch.setattr(Router, "select", traced_select)
    for name, module in theirs.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, args, out: expected_ids.append(out[2]))
    logits, reference = model(inputs), theirs(inputs).logits
    assert len(chosen) == len(expected_ids) == args.n_layers
    for ids, others, probabilities in zip(chosen, expected_ids, scores, strict=True):
        ranked = probabilities.sort(-1, descending=True).values
        if args.top_k == args.num_experts:
            is_clear = torch.ones(len(ids), dtype=torch.bool)
        else:
            is_clear = ranked[:, args.top_k - 1] - ranked[:, args.top_k] > 1e-6
        assert is_clear.float().mean() > 0.95
        assert torch.equal(ids.sort().values[is_clear], others.sort().values[is_clear])
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() <= 1e-5
    model(inputs, labels).backward()
    torch.nn.functional.cross_entropy(
        reference.flatten(0, 1), labels.flatten(), reduction="sum"
    ).backward()
    pairs = links(QWEN.hf_names(args), shapes_of(model), QWEN.tied(args))
    expected = to_native(pairs, gradients_per_expert(theirs), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        scale = expected[name].norm()
        if "router" in name and args.top_k == 1 and args.route_norm:
            continue  # one normalized weight is 1, whatever its score is
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * scale, name


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, tied):
    """Nothing is missing or unexpected, sizes and logits are equal."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    args, model = build({"vocab_size": 2048, "enable_weight_tying": tied})
    perturb(model)
    save_file(hf_state(args, model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assets = repo_root / "tests/assets/tokenizer"
    write_folder(
        tmp_path,
        config=QWEN.hf_config(args),
        dtype=torch.float32,
        assets=assets,
        bos=None,
        eos=None,
    )
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert isinstance(theirs, transformers.Qwen3MoeForCausalLM)
    assert not any(report.values()), report
    assert (
        theirs.config.num_experts_per_tok == args.top_k
        and theirs.config.norm_topk_prob is args.route_norm
    )
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5
