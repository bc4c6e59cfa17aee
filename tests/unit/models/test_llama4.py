"""Llama 4: the published sizes, and Hugging Face's logits, gradients, routing, and files."""

import random
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from tests.harness.hf_weights import to_external, to_native
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.models import InitRule, get_spec, resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.models.layers.kernels import additive_mask, block_mask
from torchtitan_like.models.layers.moe import Router
from torchtitan_like.models.spec import fit_positions

LLAMA4 = get_spec("llama4")
SMALL = {
    "dim": 64,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 96,
    "multiple_of": 8,
    "max_seq_len": 128,
    "every_n_layers_nope": 2,
    "fixed_attn_block_size": 16,
    "use_qk_norm": True,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_original_max_seq_len": 16,
}


def build(overrides=None, dtype=torch.float32):
    args = resolve_args(LLAMA4, "debugmodel", SMALL | (overrides or {}))
    with torch.device("meta"):
        model = LLAMA4.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, LLAMA4.init_table(args), 0)
    return args, model


@torch.no_grad()
def perturb(model):
    """Make norms, scores, and hidden units differ widely, so that any fault shows."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.state_dict().items():
        if name.endswith("norm.weight"):
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
        elif "router" in name:
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        elif "layers" in name:
            weight.mul_(5)


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def table(args, model):
    return links(LLAMA4.hf_names(args), shapes_of(model), LLAMA4.tied(args))


def hf_state(args, model):
    return to_external(table(args, model), model.state_dict())


def hf_model(args, model):
    """Return the same model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(**LLAMA4.hf_config(args), attn_implementation="eager")
    theirs = transformers.Llama4ForCausalLM(config)
    theirs.load_state_dict(hf_state(args, model), strict=not args.enable_weight_tying)
    return theirs


def some_tokens(args, batch=2, seq=49):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, args.vocab_size, (batch, seq), generator=generator)


# ---- sizes


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("debugmodel", 15_017_216, 6_759_680, 0.641392128),
        ("debugmodel_irope", 15_017_216, 6_759_680, 0.142007808),
        ("17bx16e", 107_769_861_120, 17_172_894_720, 193.46721792),
        ("17bx16e_irope", 107_769_861_120, 17_172_894_720, 139.10903808),
        ("17bx128e", 400_711_848_960, 17_184_691_200, 193.5379968),
        ("17bx128e_irope", 400_711_848_960, 17_184_691_200, 139.17981696),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The totals equal transformers' text models of these sizes."""
    args = resolve_args(LLAMA4, flavor, {})
    with torch.device("meta"):
        model = LLAMA4.build(args)
    assert LLAMA4.num_params(args) == total == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    others = experts * (args.num_experts - args.top_k) // args.num_experts
    assert LLAMA4.num_active_params(args) == active == total - others
    assert LLAMA4.flops_per_token(args, 32768) == pytest.approx(gflops * 1e9, rel=1e-12)


def test_chunks_bound_the_flops_of_three_of_four_layers():
    args = resolve_args(LLAMA4, "17bx16e_irope", {})
    plain = resolve_args(LLAMA4, "17bx16e", {})
    assert LLAMA4.flops_per_token(args, 8192) == LLAMA4.flops_per_token(plain, 8192)
    saved = LLAMA4.flops_per_token(plain, 16384) - LLAMA4.flops_per_token(args, 16384)
    assert saved == 6 * 36 * args.n_heads * 2 * args.head_dim * 8192


@pytest.mark.parametrize("flavor", ["17bx16e_irope", "17bx128e_irope"])
def test_layers_of_the_published_models(flavor):
    """Every fourth layer has no rotation; the experts of the second model are in every second layer."""
    args = resolve_args(LLAMA4, flavor, {})
    assert (args.head_dim, args.ffn_dim, args.moe_inter_dim) == (128, 16384, 8192)
    assert [i for i in range(48) if not args.is_rotated(i)] == list(range(3, 48, 4))
    first, step = (0, 1) if flavor == "17bx16e_irope" else (1, 2)
    assert [i for i in range(48) if args.has_experts(i)] == list(range(first, 48, step))
    assert args.use_qk_norm == (flavor == "17bx16e_irope")
    assert {args.chunk(i) for i in range(48) if args.is_rotated(i)} == {8192}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        ({"every_n_layers_nope": 1}, "every_n_layers_nope = 1: expected 0, or at least 2"),
        ({"fixed_attn_block_size": 0}, "fixed_attn_block_size = 0: expected a number above 0"),
        ({"interleave_moe_layer_step": 7}, "layer_step = 7: expected 1 to 6; set interleave"),
        ({"attn_type": "varlen"}, "attn_type = 'varlen': expected one of sdpa, flex"),
        ({"attn_mask_type": "full"}, "attn_mask_type = 'full': expected one of causal, block_"),
        ({"attn_scale": -1.0}, "attn_scale = -1.0: expected at least 0"),
        ({"ffn_dim_multiplier": 0.0}, "ffn_dim_multiplier = 0.0: expected a number above 0"),
        ({"rope_high_freq_factor": 0.5}, "rope_high_freq_factor = 0.5: expected at least"),
        ({"rope_theta": 1.0}, "rope_theta = 1.0: expected a number above 1"),
        ({"n_heads": 3}, "dim = 256: expected a multiple of 2 x n_heads = 6"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3: expected a divisor of n_heads = 16; set n_k"),
        ({"n_kv_heads": 0}, "n_kv_heads = 0: expected a number above 0; remove it"),
        ({"load_balance": "even"}, "load_balance = 'even': expected one of"),
    ],
)
def test_the_error_names_a_wrong_size(overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(LLAMA4, "debugmodel", overrides)
    assert expected in str(error.value)


def test_every_parameter_has_one_role_and_one_rule():
    args, model = build()
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in LLAMA4.sharding) == 1, name
        assert any(fnmatchcase(name, p) for p, _ in LLAMA4.init_table(args)), name
    for pattern, _ in (*LLAMA4.sharding, *LLAMA4.init_table(args)):
        assert any(fnmatchcase(name, pattern) for name in names), pattern


PLAIN = InitRule("trunc_normal", 0.02, 100.0)
RESIDUAL = InitRule("trunc_normal", 0.01, 200.0)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("layers.2.attention_norm.weight", InitRule("ones")),
        ("tok_embeddings.weight", InitRule("normal", 1.0)),
        ("layers.1.attention.wq.weight", PLAIN),
        ("layers.1.attention.wo.weight", RESIDUAL),
        ("layers.0.feed_forward.w1.weight", PLAIN),
        ("layers.1.moe.experts.w1", PLAIN),
        ("layers.1.moe.experts.w2", RESIDUAL),
        ("layers.1.moe.experts.w3", RESIDUAL),
        ("layers.1.moe.shared_experts.w1.weight", PLAIN),
        ("layers.1.moe.shared_experts.w3.weight", RESIDUAL),
        ("layers.1.moe.router.gate.weight", RESIDUAL),
        ("output.weight", InitRule("trunc_normal", 1 / 16, 3.0)),
    ],
)
def test_rules_of_initial_weights(name, rule):
    rules = LLAMA4.init_table(resolve_args(LLAMA4, "debugmodel", {}))
    actual = next(rule for pattern, rule in rules if fnmatchcase(name, pattern))
    assert actual.kind == rule.kind
    assert (actual.std, actual.bound) == pytest.approx((rule.std, rule.bound))


# ---- attention


def test_a_chunk_does_not_attend_to_earlier_chunks():
    """Only layers without rotation mix chunks."""
    for n_layers, sees in ((1, False), (2, True)):
        overrides = {"n_layers": n_layers, "interleave_moe_layer_step": 1, "top_k": 8}
        args, model = build(overrides)
        perturb(model)
        tokens = some_tokens(args, batch=1, seq=40)
        changed = tokens.clone()
        changed[0, 3] = (changed[0, 3] + 1) % args.vocab_size
        differs = (model(tokens)[0] != model(changed)[0]).any(-1).tolist()
        assert differs[:3] == [False] * 3
        assert all(differs[3:16])
        assert any(differs[16:]) == sees


@pytest.mark.parametrize("num_queries", [20, 7])
def test_block_masks_equal_additive_masks(num_queries):
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None, -num_queries:]
    for options in ({"chunk": 6}, {"chunk": 6, "window": 4}, {"chunk": 30}):
        expected = additive_mask(positions, torch.float32, 20, **options)[0, 0] == 0
        attends = block_mask(positions, torch.float32, 20, **options).mask_mod
        zero = torch.tensor(0)
        query, key = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
        for row, queries, keys in zip(expected, query, key, strict=True):
            pairs = zip(queries, keys, strict=True)
            assert [bool(attends(zero, zero, q, k)) for q, k in pairs] == row.tolist()


def test_a_chunk_mask_is_causal_within_chunks_and_documents():
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    attends = additive_mask(positions, torch.float32, 20, chunk=6)[0, 0] == 0
    for query in range(20):
        start = max(6 * (query // 6), 8 if query >= 8 else 0)
        assert attends[query].nonzero().flatten().tolist() == list(range(start, query + 1))


@pytest.mark.parametrize("chunk", [6, 64])
def test_documents_do_not_affect_each_other(chunk):
    """The second document starts at a chunk border, as in a separate sample."""
    overrides = {"fixed_attn_block_size": chunk, "attn_mask_type": "block_causal"}
    args, model = build(overrides, torch.float64)
    perturb(model)
    tokens = some_tokens(args, batch=1, seq=21)
    positions = torch.cat([torch.arange(12), torch.arange(9)])[None]
    together = model(tokens, None, positions)
    first, second = (model(part) for part in tokens.split([12, 9], dim=1))
    assert (together - torch.cat([first, second], dim=1)).abs().max() <= 1e-12


def test_short_sequences_do_not_change_the_temperature():
    """Tables of another length compute the same function."""
    args, model = build()
    _, short = build({"max_seq_len": 7})
    assert fit_positions(args, 7).floor_scale == args.floor_scale == 8
    assert short.layers["1"].attention.temperature is None
    tokens = some_tokens(args, seq=7)
    assert torch.equal(model(tokens), short(tokens))
    _, constant = build({"attn_scale": 0.0})
    perturb(model)
    perturb(constant)
    tokens = some_tokens(args, seq=30)
    differs = (model(tokens)[0] != constant(tokens)[0]).any(-1)
    assert not differs[:7].any() and differs[7:].all()


# ---- Hugging Face


def random_sizes(seed):
    choose = random.Random(seed).choice
    return {
        "n_layers": choose([3, 4]),
        "n_heads": choose([4, 8]),
        "n_kv_heads": choose([1, 2, 4, None]),
        "norm_eps": choose([1e-5, 1e-3]),
        "ffn_dim_multiplier": choose([None, 0.5]),
        "auto_scale_hidden_dim": choose([True, True, False]),
        "num_experts": choose([4, 8, 16]),
        "top_k": choose([1, 1, 2, 4]),
        "interleave_moe_layer_step": choose([1, 2, 3]),
        "every_n_layers_nope": choose([0, 2, 3, 4]),
        "fixed_attn_block_size": choose([8, 16, 48, 64]),
        "use_qk_norm": choose([False, True]),
        "attn_scale": choose([0.0, 0.1, 1.0]),
        "floor_scale": choose([4, 16, 64]),
        "rope_theta": choose([10000.0, 500000.0]),
        "rope_scaling_factor": choose([1.0, 8.0, 16.0]),
        "rope_high_freq_factor": choose([1.0, 4.0]),
        "enable_weight_tying": choose([False, False, True]),
    }


CELLS = [pytest.param(seed, marks=[pytest.mark.nightly] if seed >= 2 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, seed):
    args, model = build(random_sizes(seed))
    perturb(model)
    theirs = hf_model(args, model)
    tokens = some_tokens(args)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    chosen, scores, gaps = [], [], []
    select = Router.select

    def traced_select(router, logits, expert_bias):
        ranked = logits.topk(min(router.top_k + 1, logits.shape[1]), -1).values
        is_all = router.top_k == logits.shape[1]
        gaps.append(torch.inf if is_all else ranked[:, router.top_k - 1] - ranked[:, -1])
        chosen.append(select(router, logits, expert_bias))
        return chosen[-1]

    monkeypatch.setattr(Router, "select", traced_select)
    for name, module in theirs.named_modules():
        if name.endswith("feed_forward.router"):
            module.register_forward_hook(lambda _, args, out: scores.append(out[0]))
    logits, reference = model(inputs), theirs(inputs).logits
    assert len(chosen) == len(scores) == sum(map(args.has_experts, range(args.n_layers)))
    for ids, weights, gap in zip(chosen, scores, gaps, strict=True):
        is_clear = torch.as_tensor(gap).expand(len(ids)) > 1e-6
        assert is_clear.float().mean() > 0.95
        is_chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(1, ids, True)
        assert torch.equal(is_chosen[is_clear], (weights > 0)[is_clear])
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() <= 1e-5
    model(inputs, labels).backward()
    torch.nn.functional.cross_entropy(
        reference.flatten(0, 1), labels.flatten(), reduction="sum"
    ).backward()
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    pairs = [link for link in table(args, model) if link.native in parameters]
    expected = to_native(pairs, gradients, parameters)
    for name, parameter in parameters.items():
        error = (parameter.grad - expected[name]).norm()
        assert error <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("every_n_layers_nope", [0, 2])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, every_n_layers_nope):
    """Nothing is missing or unexpected, sizes and logits are equal."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    sizes = {"vocab_size": 2048, "every_n_layers_nope": every_n_layers_nope}
    args, model = build(sizes)
    perturb(model)
    save_file(hf_state(args, model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_folder(
        tmp_path,
        config=LLAMA4.hf_config(args),
        dtype=torch.float32,
        assets=repo_root / "tests/assets/tokenizer",
        bos=None,
        eos=None,
    )
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert type(theirs).__name__ == "Llama4ForCausalLM"
    assert not any(report.values()), report
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5


def test_the_order_of_weights_and_experts_matters():
    """The weights of Llama 4 multiply the inputs of the experts, so that they are not linear."""
    args, model = build({"n_layers": 1, "interleave_moe_layer_step": 1})
    perturb(model)
    moe = model.layers["0"].moe
    x = torch.randn(1, 30, args.dim, generator=torch.Generator().manual_seed(3))
    routed = moe(x) - moe.shared_experts(x)
    ids = moe.router.gate(x).argmax(-1)
    weights = moe.router.gate(x).amax(-1, keepdim=True).sigmoid()
    for token, expert, weight, actual in zip(x[0], ids[0], weights[0], routed[0], strict=True):
        scaled = weight * token
        hidden = torch.nn.functional.silu(moe.experts.w1[expert] @ scaled)
        expected = moe.experts.w2[expert] @ (hidden * (moe.experts.w3[expert] @ scaled))
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert replace(args, top_k=2).moe_inter_dim < args.moe_inter_dim
