"""Llama 3: logits equal Hugging Face's, and the model meets the framework's requirements."""

import copy

import pytest
import torch

from tests.harness.hf_weights import to_external
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import links
from torchtitan_like.models.layers.rotary import RotaryEmbedding

LLAMA = get_spec("llama3")
SMALL = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "vocab_size": 96,
    "max_seq_len": 64,
    "multiple_of": 32,
}


def build(overrides=None, dtype=torch.float32, seed=0):
    args = resolve_args(LLAMA, "debugmodel", SMALL | (overrides or {}))
    with torch.device("meta"):
        model = LLAMA.build(args).to(dtype)
    materialize(model, torch.device("cpu"))
    initialize(model, LLAMA.init_table(args), seed)
    return args, model


def some_tokens(args, batch=2, seq=32):
    return torch.randint(
        0, args.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1)
    )


SCALED_ROPE = {"rope_original_max_seq_len": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("overrides", "seq"),
    [
        ({"rope_scaling_factor": 1.0}, 48),
        ({"n_kv_heads": 2, "rope_scaling_factor": 1.0}, 48),
        ({"n_kv_heads": 1, "max_seq_len": 1024, **SCALED_ROPE}, 1024),
        ({"n_kv_heads": 2, "max_seq_len": 8192, "n_layers": 1, **SCALED_ROPE}, 8192),
        ({"enable_weight_tying": True, "norm_eps": 1e-3}, 48),
    ],
    ids=["plain", "gqa", "scaled rope", "long", "tied"],
)
def test_logits_equal_hugging_face(overrides, seq):
    """At 8,192 tokens, a last-digit error of a rotary frequency would change logits by 1e-4."""
    transformers = pytest.importorskip("transformers")
    args, model = build(overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(
                    0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
                )
            else:  # make attention non-uniform, with logits of order 1
                weight.mul_(3 if "layers" in name else 1)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    external = to_external(
        links(LLAMA.hf_names(args), shapes, LLAMA.tied(args)), model.state_dict()
    )
    config = transformers.LlamaConfig(**LLAMA.hf_config(args))
    hf_model = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = hf_model.load_state_dict(external, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if args.enable_weight_tying else [])
    hf_model.tie_weights()
    tokens = some_tokens(args, batch=1, seq=seq)
    with torch.no_grad():
        logits, reference = model(tokens), hf_model(tokens).logits
    assert (logits - reference).abs().max() <= 1e-5
    if args.rope_scaling_factor != 1.0:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.scaling = None
        model.init_buffers(torch.device("cpu"))
        with torch.no_grad():
            assert (model(tokens) - reference).abs().max() > 1e-3, (
                "expected scaled frequencies to change the logits"
            )


def test_module_names():
    _, model = build()
    assert sorted(
        name
        for name, _ in model.named_parameters()
        if not name.startswith(("layers.1", "layers.2"))
    ) == [
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
        "output.weight",
        "tok_embeddings.weight",
    ]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_forward_with_labels_returns_the_sum_of_token_losses():
    args, model = build()
    tokens, labels = some_tokens(args), some_tokens(args).roll(-1, dims=1)
    labels[:, -1] = -100
    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(model(tokens, labels), expected)


def test_attention_is_causal():
    args, model = build()
    tokens = some_tokens(args)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % args.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() == 0 and difference[20:].min() > 0


def test_positions_restart_rotations():
    args, model = build()
    tokens = some_tokens(args)
    consecutive = torch.arange(32).expand(2, 32)
    assert torch.equal(model(tokens, positions=consecutive), model(tokens))
    restarted = model(tokens, positions=consecutive % 16)
    assert torch.equal(restarted[:, :16], model(tokens)[:, :16])
    assert not torch.equal(restarted, model(tokens))


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_outputs_and_gradients_have_the_dtype_of_the_model(dtype, loss_dtype):
    args, model = build(dtype=dtype)
    tokens = some_tokens(args)
    assert model(tokens).dtype == dtype
    loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == loss_dtype
    assert all(p.grad.dtype == dtype for p in model.parameters())
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_float64_agrees_with_float32():
    args, model = build()
    tokens = some_tokens(args)
    _, fp64_model = build(dtype=torch.float64)
    fp64_model.load_state_dict(model.state_dict())
    assert (model(tokens, tokens) / fp64_model(tokens, tokens) - 1).abs() < 1e-6


def test_the_gradient_of_a_tied_weight_is_the_sum_of_two():
    args, model = build({"enable_weight_tying": True})
    assert model.output.weight is model.tok_embeddings.weight
    tokens = some_tokens(args)
    model(tokens, tokens).backward()
    (tied,) = (p.grad for name, p in model.named_parameters() if name == "tok_embeddings.weight")
    _, untied = build({"enable_weight_tying": False})
    untied.load_state_dict(model.state_dict())
    untied(tokens, tokens).backward()
    torch.testing.assert_close(tied, untied.tok_embeddings.weight.grad + untied.output.weight.grad)


def test_two_stages_equal_the_whole_model():
    args, model = build()
    tokens = some_tokens(args)
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["2"], last.layers["0"], last.layers["1"]
    assert torch.equal(last(first(tokens), tokens), model(tokens, tokens))
    assert {
        name.split(".")[1] for name, _ in last.named_parameters() if name.startswith("layers")
    } == {"2"}


def test_every_parameter_gets_a_gradient():
    args, model = build({"n_kv_heads": 2})
    tokens = some_tokens(args)
    model(tokens, tokens.roll(-1, dims=1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_sequence_above_max_seq_len_is_refused():
    args, model = build()
    with pytest.raises(ValueError, match="65 tokens is longer than max_seq_len = 64"):
        model(some_tokens(args, seq=65))
