"""Qwen3: published sizes, logits equal to Hugging Face's, and the framework's requirements."""

import copy
import math
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
import torch

from tests.distributed import parity
from tests.distributed.parity import short_documents
from tests.harness.hf_weights import to_external, to_native
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.models import InitRule, get_spec, resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.util.jsonl import read_rows

QWEN = get_spec("qwen3")
SMALL = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "hidden_dim": 96,
    "vocab_size": 96,
    "max_seq_len": 64,
}
UNTIED = {"enable_weight_tying": False}


def build(overrides=None, dtype=torch.float32, seed=0):
    args = resolve_args(QWEN, "debugmodel", SMALL | (overrides or {}))
    with torch.device("meta"):
        model = QWEN.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, QWEN.init_table(args), seed)
    return args, model


def perturb(model):
    """Change norm weights from 1 and make attention non-uniform. Logits stay of order 1."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.add_(torch.rand(weight.shape, generator=generator))
            elif name.endswith("norm.weight"):
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            elif "layers" in name:
                weight.mul_(3)


def shapes_of(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def hf_state(args, model):
    return to_external(
        links(QWEN.hf_names(args), shapes_of(model), QWEN.tied(args)),
        dict(model.named_parameters()),
    )


def some_tokens(args, batch=2, seq=32):
    return torch.randint(
        0, args.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1)
    )


# ---- sizes


@pytest.mark.parametrize(
    ("flavor", "parameters", "tied"),
    [
        ("debugmodel", 31_987_968, True),
        ("0.6B", 596_049_920, True),
        ("1.7B", 1_720_574_976, True),
        ("4B", 4_022_468_096, True),
        ("8B", 8_190_735_360, False),
        ("14B", 14_768_307_200, False),
        ("32B", 32_762_123_264, False),
    ],
)
def test_numbers_of_parameters(flavor, parameters, tied):
    """Numbers from the models' pages. The debug model equals TorchTitan's."""
    args = resolve_args(QWEN, flavor, {})
    with torch.device("meta"):
        model = QWEN.build(args)
    assert QWEN.num_params(args) == parameters == sum(p.numel() for p in model.parameters())
    assert (args.head_dim, args.rope_theta, args.norm_eps) == (128, 1e6, 1e-6)
    assert args.enable_weight_tying is tied and bool(QWEN.tied(args)) is tied


def test_flops_per_token_of_the_0_6b_flavor():
    """Computed by hand for 0.6B at 4096 tokens. The tied output counts."""
    args = resolve_args(QWEN, "0.6B", {})
    matrices = 28 * (1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072) + 151936 * 1024
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert (
        QWEN.flops_per_token(args, 4096) == 6 * (matrices + norms) + 28 * 6 * (16 * 128) * 2 * 4096
    )
    assert QWEN.flops_per_token(resolve_args(QWEN, "0.6B", UNTIED), 4096) == QWEN.flops_per_token(
        args, 4096
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"n_kv_heads": 5}, "n_kv_heads = 5: expected a divisor of n_heads = 16"),
        ({"n_kv_heads": 0}, "n_kv_heads = 0: expected a number above 0"),
        ({"head_dim": 63}, "head_dim = 63: expected an even number"),
        ({"attn_type": "ring"}, "attn_type = 'ring': expected one of sdpa, flex, varlen"),
        ({"init_std": 0.0}, "init_std = 0.0: expected a number above 0"),
        ({"multiple_of": 16}, "multiple_of = 16: qwen3 has no such argument"),
    ],
)
def test_an_invalid_size_is_reported(overrides, expected):
    with pytest.raises(ValueError) as error:
        resolve_args(QWEN, "0.6B", overrides)
    assert expected in str(error.value)


def test_sizes_need_no_torch():
    program = (
        "import sys; from torchtitan_like.models import get_spec, resolve_args\n"
        "spec = get_spec('qwen3'); args = resolve_args(spec, '8B', {'n_layers': 2})\n"
        "spec.num_params(args), spec.flops_per_token(args, 8192), spec.init_table(args), spec.hf_config(args)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False False"


# ---- tables


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_role_and_one_rule(tied):
    args, model = build({"enable_weight_tying": tied})
    names = list(shapes_of(model))
    for name in names:
        assert sum(fnmatchcase(name, pattern) for pattern, _ in QWEN.sharding) == 1, name
        assert any(fnmatchcase(name, pattern) for pattern, _ in QWEN.init_table(args)), name
    if not tied:
        _, experts = build({"num_experts": 4, "top_k": 2, **UNTIED})
        names += shapes_of(experts)
        for pattern, _ in (*QWEN.sharding, *QWEN.init_table(args)):
            assert any(fnmatchcase(name, pattern) for name in names), pattern


def test_norms_of_heads_have_their_own_role():
    """Their weights are replicated, while heads are sharded."""
    _, model = build()
    roles = {
        name: role
        for name in shapes_of(model)
        for pattern, role in QWEN.sharding
        if fnmatchcase(name, pattern)
    }
    heads = {name for name, role in roles.items() if role == "head_norm"}
    assert heads == {f"layers.{i}.attention.{x}_norm.weight" for i in range(3) for x in "qk"}


@pytest.mark.parametrize(
    ("name", "overrides", "rule"),
    [
        ("tok_embeddings.weight", {}, InitRule("trunc_normal", 1 / 16, 3.0)),
        ("tok_embeddings.weight", UNTIED, InitRule("normal", 1.0)),
        ("output.weight", UNTIED, InitRule("trunc_normal", 1 / 16, 3.0)),
        ("layers.4.attention.q_norm.weight", {}, InitRule("ones")),
        ("norm.weight", {}, InitRule("ones")),
        ("layers.4.attention.wk.weight", {}, InitRule("trunc_normal", 0.02, 100.0)),
        (
            "layers.4.feed_forward.w1.weight",
            {"init_std": 0.01},
            InitRule("trunc_normal", 0.01, 200.0),
        ),
        (
            "layers.4.attention.wo.weight",
            {},
            InitRule("trunc_normal", 0.02 / math.sqrt(10), 100 * math.sqrt(10)),
        ),
        (
            "layers.4.feed_forward.w3.weight",
            {},
            InitRule("trunc_normal", 0.02 / math.sqrt(10), 100 * math.sqrt(10)),
        ),
        (
            "layers.4.feed_forward.w2.weight",
            {"depth_init": False},
            InitRule("trunc_normal", 0.005, 400.0),
        ),
    ],
)
def test_rules_of_initial_weights(name, overrides, rule):
    """As in TorchTitan, projections into the residual stream are scaled by depth.

    The factor is 1 / sqrt(2 (l + 1)) for layer l from 0, or 1 / sqrt(2 L) for all L layers.
    """
    table = QWEN.init_table(resolve_args(QWEN, "debugmodel", overrides))
    actual = next(rule for pattern, rule in table if fnmatchcase(name, pattern))
    assert actual.kind == rule.kind
    assert (actual.std, actual.bound) == pytest.approx((rule.std, rule.bound))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", ["hf_names", "meta_names"])
def test_tables_cover_every_parameter(format, tied):
    args, model = build({"enable_weight_tying": tied})
    table_links = links(getattr(QWEN, format)(args), shapes_of(model), QWEN.tied(args))
    native = dict(model.named_parameters())
    external = to_external(table_links, native)
    assert len(external) == len(native)
    restored = to_native(table_links, external, native)
    assert all(torch.equal(restored[name], weight) for name, weight in native.items())
    assert format != "meta_names" or external.keys() == native.keys()


# ---- Hugging Face


@pytest.mark.parametrize(
    ("overrides", "seq"),
    [
        ({}, 48),
        ({"n_kv_heads": 1, "norm_eps": 1e-3, **UNTIED}, 48),
        ({"head_dim": 8, "n_kv_heads": 4}, 48),
        ({"max_seq_len": 4096, "n_layers": 1}, 4096),
    ],
    ids=["tied", "untied", "narrow heads", "long"],
)
def test_logits_equal_hugging_face(overrides, seq):
    transformers = pytest.importorskip("transformers")
    args, model = build(overrides)
    perturb(model)
    hf_model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**QWEN.hf_config(args))
    ).eval()
    missing, unexpected = hf_model.load_state_dict(hf_state(args, model), strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if args.enable_weight_tying else [])
    hf_model.tie_weights()
    tokens = some_tokens(args, batch=1, seq=seq)
    with torch.no_grad():
        logits, reference = model(tokens), hf_model(tokens).logits
    assert reference.std() > 0.3
    assert (logits - reference).abs().max() <= 1e-5


def test_norms_of_heads_and_the_rotary_base_change_the_logits():
    """Otherwise the comparison of logits would not test them."""
    args, model = build()
    perturb(model)
    tokens = some_tokens(args)
    with torch.no_grad():
        logits = model(tokens)
        for module in ("q_norm", "k_norm"):
            changed = copy.deepcopy(model)
            for layer in changed.layers.values():
                getattr(layer.attention, module).weight.fill_(1)
            assert (changed(tokens) - logits).abs().max() > 1e-2, module
        _, other = build({"rope_theta": 1e4})
        other.load_state_dict(model.state_dict())
        assert (other(tokens) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("overrides", [{}, UNTIED], ids=["tied", "untied"])
def test_transformers_reads_an_exported_folder(tmp_path, repo_root, overrides):
    """Every tensor is equal bit for bit, and the config has the same sizes."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    args, model = build({"vocab_size": 2048, **overrides})
    perturb(model)
    stored = hf_state(args, model)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assets = repo_root / "tests/assets/tokenizer"
    write_folder(
        tmp_path,
        config=QWEN.hf_config(args),
        dtype=torch.float32,
        assets=assets,
        bos=None,
        eos=None,
    )
    hf_model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert isinstance(hf_model, transformers.Qwen3ForCausalLM)
    assert not any(report.values()), report
    assert all(torch.equal(hf_model.state_dict()[name], tensor) for name, tensor in stored.items())
    config = hf_model.config.to_dict()
    expected = QWEN.hf_config(args)
    assert config["rope_parameters"]["rope_theta"] == expected.pop("rope_theta") == args.rope_theta
    assert (
        expected.pop("rope_scaling") is None and config["rope_parameters"]["rope_type"] == "default"
    )
    assert {key: config[key] for key in expected} == expected
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (hf_model(tokens).logits - model(tokens)).abs().max() <= 1e-5


# ---- requirements of the framework


def test_module_names():
    _, model = build()
    assert sorted(
        name for name in shapes_of(model) if not name.startswith(("layers.1", "layers.2"))
    ) == [
        "layers.0.attention.k_norm.weight",
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.wk.weight",
        "layers.0.attention.wo.weight",
        "layers.0.attention.wq.weight",
        "layers.0.attention.wv.weight",
        "layers.0.attention_norm.weight",
        "layers.0.feed_forward.w1.weight",
        "layers.0.feed_forward.w2.weight",
        "layers.0.feed_forward.w3.weight",
        "layers.0.ffn_norm.weight",
        "norm.weight",
        "tok_embeddings.weight",
    ]


def test_loss_equals_cross_entropy_and_all_parameters_get_gradients():
    args, model = build()
    tokens, labels = some_tokens(args), some_tokens(args).roll(-1, dims=1)
    labels[:, -1] = -100
    expected = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    loss = model(tokens, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_attention_is_causal():
    args, model = build()
    tokens = some_tokens(args)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % args.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() == 0 and difference[20:].min() > 0


@pytest.mark.parametrize("documents", [False, True])
def test_positions_separate_documents_only_with_block_causal(documents):
    """Positions restart rotations. With block_causal they also separate documents."""
    args, model = build({"attn_mask_type": "block_causal" if documents else "causal"})
    perturb(model)
    tokens = some_tokens(args)
    consecutive = torch.arange(32).expand(2, 32)
    torch.testing.assert_close(model(tokens, positions=consecutive), model(tokens))
    halves = model(tokens, positions=consecutive % 16)
    torch.testing.assert_close(halves[:, :16], model(tokens)[:, :16])
    assert torch.allclose(halves[:, 16:], model(tokens[:, 16:]), atol=1e-5) is documents


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_outputs_and_gradients_have_the_dtype_of_the_model(dtype, loss_dtype):
    args, model = build(dtype=dtype)
    tokens = some_tokens(args)
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == loss_dtype
    assert all(p.grad.dtype == dtype for p in model.parameters())
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_two_stages_equal_the_whole_model():
    args, model = build(UNTIED)
    tokens = some_tokens(args)
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["2"], last.layers["0"], last.layers["1"]
    assert torch.equal(last(first(tokens), tokens), model(tokens, tokens))


def train(argv):
    """Train as train.py does. Return the number of parameters."""
    trainer = parity.build(argv)
    trainer.train()
    parity.release(trainer)
    return sum(p.numel() for p in trainer.parts.parameters())


def test_the_debug_model_trains_from_a_file(tmp_path, repo_root):
    """The first loss is close to log(2048), so initial logits are small despite the tied output."""
    config = tmp_path / "qwen.toml"
    config.write_text(
        f'extends = "{repo_root}/train_configs/debug_model.toml"\n'
        f'[job]\ndump_folder = "{tmp_path}/outputs"\n'
        f'[model]\nname = "qwen3"\nhf_assets_path = "{repo_root}/tests/assets/tokenizer"\n'
        f'[data]\ncache_folder = "{tmp_path}/tokens"\n'
        f'[training]\ndataset_path = "{short_documents(tmp_path)}"\nsteps = 1\nseq_len = 32\nlocal_batch_size = 2\n'
        "[checkpoint]\nenable = false\n[validation]\nenable = false\n[metrics]\nenable_tensorboard = false\n"
    )
    assert run_ranks(train, 1, ["--job.config_file", str(config)]) == [31_987_968]
    (row,) = read_rows(tmp_path / "outputs/metrics.jsonl")
    assert row["loss"] == pytest.approx(math.log(2048), rel=0.1) and row["grad_norm"] > 0
