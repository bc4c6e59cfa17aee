"""DeepSeek-V3: the published sizes, and Hugging Face's logits, gradients, routing, and files."""

import random
from fnmatch import fnmatchcase

import pytest
import torch

from tests.harness.hf_weights import gradients_per_expert, load_per_expert, to_external, to_native
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.generate import generate
from torchtitan_like.models import InitRule, get_spec, resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.models.layers.moe import Router
from torchtitan_like.models.spec import fit_positions

DEEPSEEK = get_spec("deepseek_v3")
SMALL = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "inter_dim": 96,
    "moe_inter_dim": 32,
    "vocab_size": 96,
    "max_seq_len": 128,
    "num_experts": 8,
    "top_k": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "original_seq_len": 16,
    "load_balance": "none",
}
SIGMOID = {"score_func": "sigmoid", "route_norm": True}


def build(overrides=None, dtype=torch.float32):
    args = resolve_args(DEEPSEEK, "debugmodel", SMALL | (overrides or {}))
    with torch.device("meta"):
        model = DEEPSEEK.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, DEEPSEEK.init_table(args), 0)
    return args, model


@torch.no_grad()
def perturb(model):
    """Make norms, scores, and hidden units differ widely, so that any fault shows in the logits."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.state_dict().items():
        if name.endswith("norm.weight"):
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
        elif "router" in name:
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        elif "expert_bias" in name:
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        elif "layers" in name:
            weight.mul_(3)


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def table(args, model):
    return links(DEEPSEEK.hf_names(args), shapes_of(model), DEEPSEEK.tied(args))


def hf_state(args, model):
    return to_external(table(args, model), model.state_dict())


def hf_model(args, model):
    """Return the same model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = DEEPSEEK.hf_config(args)
    name = config["architectures"][0]
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    theirs = getattr(transformers, name)(config_class(**config))
    load_per_expert(theirs, hf_state(args, model))
    return theirs


def some_tokens(args, batch=2, seq=49):
    return torch.randint(
        0, args.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1)
    )


# ---- sizes


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("16B", 15_706_484_224, 2_661_150_208, 18.105996288),
        ("moonlight", 15_960_108_544, 2_914_774_528, 18.872767488),
        ("671B", 671_026_404_352, 37_552_282_624, 281.158232064),
        ("236B", 235_741_434_880, 21_375_800_320, 185.50705152),
        ("debugmodel", 33_014_016, 28_098_816, 0.920421888),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The first three totals equal transformers' models of these sizes."""
    args = resolve_args(DEEPSEEK, flavor, {})
    with torch.device("meta"):
        model = DEEPSEEK.build(args)
    assert DEEPSEEK.num_params(args) == total == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    others = experts * (args.num_experts - args.top_k) // args.num_experts
    assert DEEPSEEK.num_active_params(args) == active == total - others
    assert DEEPSEEK.flops_per_token(args, 4096) == pytest.approx(gflops * 1e9, rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        ({"n_dense_layers": 7}, "n_dense_layers = 7: expected 0 to 6; set n_dense_layers = 6"),
        ({"v_head_dim": 193}, "v_head_dim = 193: expected 1 to 192"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: expected an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0: expected a number above 0"),
        ({"rope_factor": 0.5}, "rope_factor = 0.5: expected at least 1; set rope_factor = 1"),
        ({"score_func": "relu"}, "score_func = 'relu': expected one of softmax, sigmoid"),
        ({"route_norm": True}, 'route_norm = True: expected False with score_func = "softmax"'),
        (
            {"num_expert_groups": 3},
            "num_expert_groups = 3: expected a divisor of num_experts = 8; set num_expert_groups = 2",
        ),
        (
            {"num_expert_groups": 3, "num_limited_groups": 3},
            "num_expert_groups = 3: expected a divisor of num_experts = 8; set num_expert_groups = 2",
        ),
        ({"num_expert_groups": 4}, "top_k = 3: expected at most 2, the experts in num_limited"),
        (
            SIGMOID | {"num_expert_groups": 2, "num_limited_groups": 1},
            "num_limited_groups = 1: expected top_k / 2 = 1.5",
        ),
        ({"num_mtp_layers": -1}, "num_mtp_layers = -1: expected at least 0"),
        ({"mtp_loss_weight": float("nan")}, "mtp_loss_weight = nan: expected at least 0"),
        ({"n_kv_heads": 4}, "n_kv_heads = 4: deepseek_v3 has no such argument"),
    ],
)
def test_the_error_names_a_wrong_size(overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(DEEPSEEK, "debugmodel", overrides)
    assert expected in str(error.value)


def test_every_parameter_has_one_role_and_one_rule():
    names = set()
    for overrides in ({}, {"q_lora_rank": 16}, {"num_mtp_layers": 2}):
        args, model = build(overrides)
        names |= {name for name, _ in model.named_parameters()}
        for name, _ in model.named_parameters():
            assert sum(fnmatchcase(name, pattern) for pattern, _ in DEEPSEEK.sharding) == 1, name
            assert any(fnmatchcase(name, p) for p, _ in DEEPSEEK.init_table(args)), name
    for pattern, _ in (*DEEPSEEK.sharding, *DEEPSEEK.init_table(args)):
        assert any(fnmatchcase(name, pattern) for name in names), pattern


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("layers.4.attention.kv_norm.weight", InitRule("ones")),
        ("layers.4.attention.wkv_b.weight", InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.1.attention.wo.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.experts.w1", InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.1.moe.experts.w3", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.shared_experts.w1.weight", InitRule("trunc_normal", 0.02, 100.0)),
        ("layers.1.moe.shared_experts.w2.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.router.gate.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.0.feed_forward.w1.weight", InitRule("trunc_normal", 0.02, 100.0)),
        ("output.weight", InitRule("trunc_normal", 1 / 16, 3.0)),
    ],
)
def test_rules_of_initial_weights(name, rule):
    rules = DEEPSEEK.init_table(resolve_args(DEEPSEEK, "debugmodel", {}))
    actual = next(rule for pattern, rule in rules if fnmatchcase(name, pattern))
    assert actual.kind == rule.kind
    assert (actual.std, actual.bound) == pytest.approx((rule.std, rule.bound))


def test_yarn_does_not_depend_on_the_length_of_the_tables():
    args, model = build()
    _, short = build({"max_seq_len": 16})
    assert fit_positions(args, 16).rope_factor == args.rope_factor == 40
    tokens = some_tokens(args, seq=16)
    assert torch.equal(model(tokens), short(tokens))
    _, plain = build({"rope_factor": 1.0})
    assert not torch.allclose(model(tokens), plain(tokens), rtol=1e-3)


# ---- Hugging Face


def random_sizes(seed, score_func):
    choose = random.Random(f"{seed} {score_func}").choice
    groups, limited, top_k = choose([(1, 1, 1), (1, 1, 3), (4, 2, 4), (8, 2, 4), (2, 1, 2)])
    return {
        "n_layers": choose([2, 3]),
        "n_dense_layers": choose([0, 1]),
        "norm_eps": choose([1e-6, 1e-3]),
        "num_experts": choose([8, 16, 32]) * (2 if groups == 8 else 1),
        "num_shared_experts": choose([1, 2]),
        "num_expert_groups": groups,
        "num_limited_groups": limited,
        "top_k": top_k,
        "score_func": score_func,
        "route_norm": score_func == "sigmoid" and choose([True, True, False]),
        "route_scale": choose([1.0, 2.5]),
        "q_lora_rank": choose([0, 20]),
        "v_head_dim": choose([8, 16, 24]),
        "qk_rope_head_dim": choose([8, 16]),
        "rope_factor": choose([1.0, 4.0, 40.0]),
        "mscale": choose([1.0, 0.7]),
    }


CELLS = [
    pytest.param(seed, score_func, marks=[pytest.mark.nightly] if seed >= num_in_ci else [])
    for score_func, num_in_ci, number in (("sigmoid", 8, 20), ("softmax", 2, 20))
    for seed in range(number)
]


@pytest.mark.parametrize(("seed", "score_func"), CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, seed, score_func):
    args, model = build(random_sizes(seed, score_func))
    perturb(model)
    theirs = hf_model(args, model)
    tokens = some_tokens(args)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    chosen, expected_ids, gaps = [], [], []
    select = Router.select

    def traced_select(router, logits, expert_bias):
        gaps.append(selection_margin(router, logits, expert_bias))
        chosen.append(select(router, logits, expert_bias))
        return chosen[-1]

    monkeypatch.setattr(Router, "select", traced_select)
    for name, module in theirs.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, args, out: expected_ids.append(out[2]))
    logits, reference = model(inputs), theirs(inputs).logits
    assert len(chosen) == len(expected_ids) == args.n_layers - args.n_dense_layers
    for ids, others, gap in zip(chosen, expected_ids, gaps, strict=True):
        is_clear = gap > 1e-6
        assert is_clear.float().mean() > 0.95
        assert torch.equal(ids.sort().values[is_clear], others.sort().values[is_clear])
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() <= 1e-5
    model(inputs, labels).backward()
    torch.nn.functional.cross_entropy(
        reference.flatten(0, 1), labels.flatten(), reduction="sum"
    ).backward()
    parameters = dict(model.named_parameters())
    pairs = [link for link in table(args, model) if link.native in parameters]
    expected = to_native(pairs, gradients_per_expert(theirs), parameters)
    for name, parameter in parameters.items():
        if "router" in name and args.top_k == 1 and args.route_norm:
            continue  # one normalized weight is 1, whatever its score is
        error = (parameter.grad - expected[name]).norm()
        assert error <= 1e-5 * expected[name].norm(), name


def selection_margin(router, logits, expert_bias):
    """Return how much the best rejected score of each token must rise to be chosen."""
    scores = logits.softmax(-1) if router.score_func == "softmax" else logits.sigmoid()
    scores = scores if expert_bias is None else scores + expert_bias
    gap = torch.full(scores.shape[:1], torch.inf)
    if router.num_limited_groups < router.num_groups:
        by_group = scores.unflatten(-1, (router.num_groups, -1))
        best = by_group.topk(2 if router.score_func == "sigmoid" else 1, -1).values.sum(-1)
        ranked = best.topk(router.num_limited_groups + 1, -1)
        gap = ranked.values[:, -2] - ranked.values[:, -1]
        allowed = torch.zeros_like(best).scatter(-1, ranked.indices[:, :-1], 1.0).bool()
        scores = by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    ranked = scores.topk(min(router.top_k + 1, scores.shape[1]), -1).values
    return gap.minimum(ranked[:, router.top_k - 1] - ranked[:, -1])


def test_the_bias_changes_experts_but_not_weights_of_the_same_experts():
    """A bias that is equal for all experts has no effect at all."""
    args, model = build(SIGMOID)
    perturb(model)
    tokens = some_tokens(args)
    biased = model(tokens)
    bias = model.layers["1"].moe.expert_bias
    bias += 0.5
    assert torch.equal(model(tokens), biased)
    bias.zero_()
    assert not torch.allclose(model(tokens), biased, rtol=1e-3)


@pytest.mark.parametrize("overrides", [SIGMOID | {"q_lora_rank": 16}, {}], ids=["v3", "v2"])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, overrides):
    """Nothing is missing or unexpected, sizes and logits are equal."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    args, model = build({"vocab_size": 2048, **overrides})
    perturb(model)
    save_file(hf_state(args, model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_folder(
        tmp_path,
        config=DEEPSEEK.hf_config(args),
        dtype=torch.float32,
        assets=repo_root / "tests/assets/tokenizer",
        bos=None,
        eos=None,
    )
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert type(theirs).__name__ == DEEPSEEK.hf_config(args)["architectures"][0]
    assert not any(report.values()), report
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5


def test_generation_beyond_the_context_window():
    """The window moves when the text is longer."""
    _, model = build({"vocab_size": 64, **SIGMOID})
    sampling = {"temperature": 0.0, "top_k": 1, "stop": None, "window": 8}
    new_ids = generate(model, [1, 2, 3], num_tokens=9, **sampling)
    ids = torch.tensor([[1, 2, 3, *new_ids]])
    with torch.no_grad():
        expected = [
            model(ids[:, max(end - 8, 0) : end])[0, -1].argmax().item() for end in range(3, 12)
        ]
    assert new_ids == expected
