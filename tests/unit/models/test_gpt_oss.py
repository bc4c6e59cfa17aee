"""gpt-oss: the published sizes, and Hugging Face's logits, gradients, routing, and files."""

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
from torchtitan_like.models.layers.moe import Router
from torchtitan_like.models.spec import fit_positions

GPT_OSS = get_spec("gpt_oss")
SMALL = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_seq_len": 128,
    "sliding_window_size": 8,
    "num_experts": 8,
    "top_k": 2,
    "moe_inter_dim": 32,
    "original_seq_len": 16,
}


def build(overrides=None, dtype=torch.float32):
    args = resolve_args(GPT_OSS, "debugmodel", SMALL | (overrides or {}))
    with torch.device("meta"):
        model = GPT_OSS.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, GPT_OSS.init_table(args), 0)
    return args, model


@torch.no_grad()
def perturb(model):
    """Make norms, scores, sinks, and hidden units differ widely, so that any fault shows."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.state_dict().items():
        if name.endswith("norm.weight"):
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
        elif "router" in name:
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        elif name.endswith(("sinks", "bias", "b1", "b2", "b3")):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        elif "layers" in name:
            weight.mul_(5)


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def table(args, model):
    return links(GPT_OSS.hf_names(args), shapes_of(model), GPT_OSS.tied(args))


def hf_state(args, model):
    return to_external(table(args, model), model.state_dict())


def hf_model(args, model):
    """Return the same model of transformers, with attention that supports sinks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(**GPT_OSS.hf_config(args), attn_implementation="eager")
    theirs = transformers.GptOssForCausalLM(config)
    theirs.load_state_dict(hf_state(args, model), strict=not args.enable_weight_tying)
    return theirs


def some_tokens(args, batch=2, seq=49):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, args.vocab_size, (batch, seq), generator=generator)


# ---- sizes


@pytest.mark.parametrize(
    ("flavor", "total", "active", "gflops"),
    [
        ("debugmodel", 183_397_920, 147_912_224, 1.396491456),
        ("20b", 20_914_757_184, 4_187_440_704, 26.557179264),
        ("120b", 116_829_156_672, 5_711_982_912, 38.158100352),
    ],
)
def test_number_of_parameters_and_flops(flavor, total, active, gflops):
    """The last two totals equal transformers' models of these sizes."""
    args = resolve_args(GPT_OSS, flavor, {})
    with torch.device("meta"):
        model = GPT_OSS.build(args)
    assert GPT_OSS.num_params(args) == total == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    others = experts * (args.num_experts - args.top_k) // args.num_experts
    assert GPT_OSS.num_active_params(args) == active == total - others
    assert GPT_OSS.flops_per_token(args, 8192) == pytest.approx(gflops * 1e9, rel=1e-12)


def test_windows_bound_the_flops_of_half_of_the_layers():
    """With full windows the 20b model needs 31.31 GFLOP for a token of a sequence of 8192."""
    args = resolve_args(GPT_OSS, "20b", {"sliding_window_size": 8192})
    assert GPT_OSS.flops_per_token(args, 8192) == pytest.approx(31.31e9, rel=1e-3)
    for seq_len in (64, 128):  # windows as long as the sequence
        short = replace(args, sliding_window_size=128)
        assert GPT_OSS.flops_per_token(short, seq_len) == GPT_OSS.flops_per_token(args, seq_len)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"top_k": 9}, "top_k = 9: expected 1 to 8; set top_k = 8"),
        (
            {"sliding_window_size": 0},
            "sliding_window_size = 0: expected a number above 0; remove it",
        ),
        ({"attn_type": "varlen"}, "attn_type = 'varlen': expected one of sdpa, flex"),
        ({"attn_mask_type": "full"}, "attn_mask_type = 'full': expected one of causal, block_"),
        ({"rope_factor": 0.5}, "rope_factor = 0.5: expected at least 1; set rope_factor = 1"),
        ({"head_dim": 7}, "rotated in pairs; set head_dim = 8"),
        (
            {"n_kv_heads": 3},
            "n_kv_heads = 3: expected a divisor of n_heads = 64; set n_kv_heads = 2",
        ),
        ({"load_balance": "even"}, "load_balance = 'even': expected one of"),
    ],
)
def test_the_error_names_a_wrong_size(overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(GPT_OSS, "debugmodel", overrides)
    assert expected in str(error.value)


def test_every_parameter_has_one_role_and_one_rule():
    args, model = build()
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in GPT_OSS.sharding) == 1, name
        assert any(fnmatchcase(name, p) for p, _ in GPT_OSS.init_table(args)), name
    for pattern, _ in (*GPT_OSS.sharding, *GPT_OSS.init_table(args)):
        assert any(fnmatchcase(name, pattern) for name in names), pattern


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("layers.2.attention_norm.weight", InitRule("ones")),
        ("tok_embeddings.weight", InitRule("normal", 1.0)),
        ("layers.1.attention.wq.weight", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.attention.wo.bias", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.attention.sinks", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.experts.w1", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.experts.b2", InitRule("trunc_normal", 0.01, 200.0)),
        ("layers.1.moe.router.gate.bias", InitRule("trunc_normal", 0.01, 200.0)),
        ("output.weight", InitRule("trunc_normal", 1 / 16, 3.0)),
    ],
)
def test_rules_of_initial_weights(name, rule):
    rules = GPT_OSS.init_table(resolve_args(GPT_OSS, "debugmodel", {}))
    actual = next(rule for pattern, rule in rules if fnmatchcase(name, pattern))
    assert actual.kind == rule.kind
    assert (actual.std, actual.bound) == pytest.approx((rule.std, rule.bound))


# ---- attention


def test_every_second_layer_has_a_window():
    """With one layer, tokens before the window do not affect a token; with two layers, they do."""
    for n_layers, sees in ((1, False), (2, True)):
        args, model = build({"n_layers": n_layers, "top_k": 8})
        perturb(model)
        tokens = some_tokens(args, batch=1, seq=20)
        changed = tokens.clone()
        changed[0, 3] += 1 - 2 * (changed[0, 3] == args.vocab_size - 1).long()
        before, after = model(tokens)[0], model(changed)[0]
        differs = (before != after).any(-1).tolist()
        assert differs[:3] == [False] * 3
        assert all(differs[3:11])  # tokens 3 to 10 see token 3 in a window of 8 tokens
        assert any(differs[11:]) == sees


@pytest.mark.parametrize("window", [4, 64])
def test_documents_do_not_affect_each_other(window):
    """Two documents in one sample have the same logits as in separate samples."""
    overrides = {"sliding_window_size": window, "attn_mask_type": "block_causal"}
    args, model = build(overrides, torch.float64)
    perturb(model)
    tokens = some_tokens(args, batch=1, seq=22)
    positions = torch.cat([torch.arange(13), torch.arange(9)])[None]
    together = model(tokens, None, positions)
    first, second = (model(part) for part in tokens.split([13, 9], dim=1))
    assert (together - torch.cat([first, second], dim=1)).abs().max() <= 1e-12


def test_a_high_sink_takes_all_attention():
    """Attention then adds only its output bias, for any earlier tokens."""
    args, model = build({"n_layers": 1, "top_k": 8})
    perturb(model)
    tokens = some_tokens(args, batch=1, seq=6)
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % args.vocab_size
    assert not torch.allclose(model(tokens)[0, -1], model(changed)[0, -1], rtol=1e-3)
    with torch.no_grad():
        model.layers["0"].attention.sinks.fill_(1e4)
    assert torch.equal(model(tokens)[0, -1], model(changed)[0, -1])


@pytest.mark.parametrize("num_queries", [20, 7])
def test_block_masks_equal_additive_masks(num_queries):
    from torchtitan_like.models.layers.kernels import additive_mask, block_mask

    positions = torch.cat([torch.arange(8), torch.arange(12)])[None, -num_queries:]
    for options in ({"window": 5}, {"has_sink": True}, {"window": 5, "has_sink": True}):
        expected = additive_mask(positions, torch.float32, 20, **options)[0, 0] == 0
        attends = block_mask(positions, torch.float32, 20, **options).mask_mod
        zero = torch.tensor(0)
        query, key = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
        for row, queries, keys in zip(expected, query, key, strict=True):
            pairs = zip(queries, keys, strict=True)
            assert [bool(attends(zero, zero, q, k)) for q, k in pairs] == row.tolist()
        assert expected[:, 0].all() or not options.get("has_sink")


def test_yarn_does_not_depend_on_the_length_of_the_tables():
    args, model = build()
    _, short = build({"max_seq_len": 16})
    assert fit_positions(args, 16).rope_factor == args.rope_factor == 32
    tokens = some_tokens(args, seq=16)
    assert torch.equal(model(tokens), short(tokens))
    _, plain = build({"rope_factor": 1.0})
    assert not torch.allclose(model(tokens), plain(tokens), rtol=1e-3)


# ---- Hugging Face


def random_sizes(seed):
    choose = random.Random(seed).choice
    num_experts = choose([4, 8, 16])
    return {
        "n_layers": choose([2, 3]),
        "n_heads": choose([4, 8]),
        "n_kv_heads": choose([1, 2, 4]),
        "head_dim": choose([8, 16, 20]),
        "sliding_window_size": choose([4, 8, 16, 64]),
        "norm_eps": choose([1e-5, 1e-3]),
        "num_experts": num_experts,
        "top_k": choose([1, 2, 4]),
        "moe_inter_dim": choose([24, 32]),
        "swiglu_limit": choose([1.0, 7.0]),
        "rope_factor": choose([1.0, 4.0, 32.0]),
        "original_seq_len": choose([8, 16, 64]),
        "rope_theta": choose([10000.0, 150000.0]),
        "enable_weight_tying": choose([False, False, True]),
    }


CELLS = [pytest.param(seed, marks=[pytest.mark.nightly] if seed >= 5 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", CELLS)
def test_logits_gradients_and_routing_equal_transformers(monkeypatch, seed):
    args, model = build(random_sizes(seed))
    perturb(model)
    theirs = hf_model(args, model)
    tokens = some_tokens(args)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    chosen, expected_ids, gaps = [], [], []
    select = Router.select

    def traced_select(router, logits, expert_bias):
        ranked = logits.topk(min(router.top_k + 1, logits.shape[1]), -1).values
        is_all = router.top_k == logits.shape[1]
        gaps.append(torch.inf if is_all else ranked[:, router.top_k - 1] - ranked[:, -1])
        chosen.append(select(router, logits, expert_bias))
        return chosen[-1]

    monkeypatch.setattr(Router, "select", traced_select)
    for name, module in theirs.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda _, args, out: expected_ids.append(out[2]))
    logits, reference = model(inputs), theirs(inputs).logits
    assert len(chosen) == len(expected_ids) == args.n_layers
    for ids, others, gap in zip(chosen, expected_ids, gaps, strict=True):
        is_clear = torch.as_tensor(gap).expand(len(ids)) > 1e-6
        assert is_clear.float().mean() > 0.95
        assert torch.equal(ids.sort().values[is_clear], others.sort().values[is_clear])
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
        if "router" in name and args.top_k == 1:
            continue  # one normalized weight is 1, whatever its score is
        error = (parameter.grad - expected[name]).norm()
        assert error <= 1e-5 * expected[name].norm(), name


def test_transformers_reads_an_exported_folder(tmp_path, repo_root):
    """Nothing is missing or unexpected, sizes and logits are equal."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    args, model = build({"vocab_size": 2048})
    perturb(model)
    save_file(hf_state(args, model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_folder(
        tmp_path,
        config=GPT_OSS.hf_config(args),
        dtype=torch.float32,
        assets=repo_root / "tests/assets/tokenizer",
        bos=None,
        eos=None,
    )
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto", attn_implementation="eager"
    )
    assert type(theirs).__name__ == "GptOssForCausalLM"
    assert not any(report.values()), report
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5
