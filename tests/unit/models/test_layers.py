"""Each layer equals an independent float64 reference."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_like.models.layers.attention import Attention, causal_attention
from torchtitan_like.models.layers.decoder import FeedForward
from torchtitan_like.models.layers.head import OutputHead
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import (
    FusedRotation,
    Linear,
    Llama3,
    RotaryEmbedding,
    Yarn,
    rotate,
)


class OpNames(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# One rounding: 6e-8 in fp32, and in bf16 at most 2^-9 = 2e-3 (1.7e-3 rms). Two roundings fail.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-7), (torch.bfloat16, 1.75e-3)],
)
def test_rms_norm_rounds_once(dtype, tolerance):
    torch.manual_seed(0)
    norm = RMSNorm(256, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, grad = (
        torch.randn(4, 64, 256, dtype=dtype, requires_grad=True),
        torch.randn(4, 64, 256, dtype=dtype),
    )
    y = norm(x)
    y.backward(grad)

    x64, w64 = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    reference = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w64
    reference.backward(grad.double())
    assert y.dtype == x.grad.dtype == norm.weight.grad.dtype == dtype
    assert relative(y, reference) < tolerance
    assert relative(x.grad, x64.grad) < tolerance
    assert relative(norm.weight.grad, w64.grad) < tolerance


def test_rms_norm_equals_torch():
    torch.manual_seed(0)
    norm, x = RMSNorm(64, eps=1e-5), torch.randn(2, 8, 64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (64,), norm.weight, 1e-5))
    assert torch.autograd.gradcheck(norm.double(), x.double().requires_grad_())


def test_a_second_derivative_of_rms_norm_is_refused():
    x = torch.randn(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(RMSNorm(8, eps=1e-5)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("scaling", [None, Linear(4.0), Llama3(8.0, original_max_seq_len=64)])
def test_rotation_is_a_complex_product(scaling):
    rotary = RotaryEmbedding(16, 128, 1e4, scaling=scaling)
    x = torch.randn(2, 128, 3, 16)
    angle = torch.outer(torch.arange(128.0), rotary.frequencies()).double()
    pairs = (
        torch.complex(*x.double().chunk(2, dim=-1))
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    assert (
        relative(rotate(x, *rotary.tables(128)), torch.cat([pairs.real, pairs.imag], dim=-1)) < 1e-7
    )


def test_neighbors_are_rotated_as_complex_numbers():
    rotary = RotaryEmbedding(16, 128, 1e4, pairs="neighbors")
    x = torch.randn(2, 128, 3, 16)
    angle = torch.outer(torch.arange(128.0), rotary.frequencies()).double()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None])
    assert relative(rotate(x, *rotary.tables(128), "neighbors"), expected.flatten(-2)) < 1e-7


@pytest.mark.parametrize("factor", [4.0, 40.0])
@pytest.mark.parametrize("theta", [1e4, 5e4])
def test_yarn_tables_equal_hugging_face(theta, factor):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096,
               "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    config = transformers.DeepseekV3Config(rope_theta=theta, rope_scaling=scaling)
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), torch.arange(16384)[None])
    yarn = Yarn(factor, 4096, beta_fast=32, beta_slow=1)
    rotary = RotaryEmbedding(64, 16384, theta, scaling=yarn, pairs="neighbors")
    # A last-bit error of a frequency causes 1e-3 at position 16,384.
    torch.testing.assert_close(rotary.cos[:, 0, ::2], cos[0, :, :32], rtol=0, atol=2e-3)
    torch.testing.assert_close(rotary.sin[:, 0, 1::2], sin[0, :, :32], rtol=0, atol=2e-3)
    frequencies = DeepseekV3RotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rotary.frequencies(), frequencies, rtol=1.2e-7, atol=0)
    plain = RotaryEmbedding(64, 1, theta).frequencies()
    assert rotary.frequencies()[0] == plain[0] and rotary.frequencies()[-1] < plain[-1]


def test_frequencies_are_scaled_as_published():
    """Wavelengths above 8192 are scaled by 8, below 2048 by 1, and monotonically in between."""
    plain = RotaryEmbedding(128, 1, 5e5).frequencies()
    ratio = RotaryEmbedding(128, 1, 5e5, scaling=Llama3(8.0)).frequencies() / plain
    wavelength = 2 * torch.pi / plain
    assert torch.all(ratio[wavelength > 8192] == 1 / 8)
    assert torch.all(ratio[wavelength < 2048] == 1)
    between = ratio[(wavelength > 2048) & (wavelength < 8192)]
    assert (
        len(between)
        and torch.all((between > 1 / 8) & (between < 1))
        and torch.all(between.diff() < 0)
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rotary_tables_equal_hugging_face(head_dim):
    """Exact to the last digit. A last-digit error of a frequency causes 1e-3 at position 16,384."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_theta=5e5,
        rope_scaling=scaling,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(16384)[None])
    rotary = RotaryEmbedding(head_dim, 16384, 5e5, scaling=Llama3(8.0))
    torch.testing.assert_close(rotary.cos[:, 0], cos[0], rtol=0, atol=1.2e-7)
    torch.testing.assert_close(
        rotary.sin[:, 0, head_dim // 2 :], sin[0, :, head_dim // 2 :], rtol=0, atol=1.2e-7
    )
    assert torch.equal(rotary.sin[:, 0, : head_dim // 2], -rotary.sin[:, 0, head_dim // 2 :])


def test_bf16_is_rotated_in_fp32_and_rounded_once():
    rotary, x = RotaryEmbedding(64, 32, 1e4), torch.randn(1, 32, 2, 64, dtype=torch.bfloat16)
    assert torch.equal(
        rotate(x, *rotary.tables(32)), rotate(x.float(), *rotary.tables(32)).bfloat16()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pairs", ["halves", "neighbors"])
def test_the_fused_rotation_gives_the_same_numbers(dtype, pairs):
    rotary = RotaryEmbedding(64, 32, 1e4, pairs=pairs)
    x, grad = torch.randn(2, 2, 32, 2, 64).to(dtype)
    x.requires_grad_()
    plain = rotate(x, *rotary.tables(32), pairs)
    fused = FusedRotation.apply(x, *rotary.tables(32), pairs)
    assert torch.equal(plain, fused)
    gradients = [torch.autograd.grad(y, x, grad)[0] for y in (plain, fused)]
    torch.testing.assert_close(*gradients)


def test_rotary_tables_do_not_depend_on_dtype_or_device():
    direct = RotaryEmbedding(64, 512, 5e5, scaling=Llama3(8.0))
    with torch.device("meta"):
        other = RotaryEmbedding(64, 512, 5e5, scaling=Llama3(8.0)).to(torch.bfloat16)
    assert other.cos.is_meta and not other.state_dict()
    other.to_empty(device="cpu").init_buffers(torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    try:
        third = RotaryEmbedding(64, 512, 5e5, scaling=Llama3(8.0))
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("cos", "sin"):
        table = getattr(direct, name)
        assert table.dtype == torch.float32
        assert torch.equal(table, getattr(other, name)) and torch.equal(table, getattr(third, name))


def test_positions_select_rows_of_the_tables():
    rotary = RotaryEmbedding(16, 8, 1e4)
    x = torch.randn(1, 8, 2, 16)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    split = torch.cat(
        [rotate(part, *rotary.tables(part.shape[1])) for part in x.split([3, 5], dim=1)], dim=1
    )
    assert torch.equal(rotate(x, *rotary.tables(8, positions)), split)
    with pytest.raises(ValueError, match="9 tokens is longer than max_seq_len = 8"):
        rotary.tables(9)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_is_causal_and_uses_the_flash_kernel(kv_heads):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (8, kv_heads, kv_heads)
    )
    with OpNames() as ops:
        out = causal_attention(q, k, v)
        out.sum().backward()
    assert "_scaled_dot_product_flash_attention_for_cpu" in ops.names
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in ops.names

    fp64_k, fp64_v = (t.double().repeat_interleave(8 // kv_heads, dim=1) for t in (k, v))
    scores = (q.double() @ fp64_k.mT / 8**0.5).masked_fill(
        torch.ones(16, 16).triu(1).bool(), float("-inf")
    )
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ fp64_v, rtol=0, atol=1e-6)


def test_the_attention_core_gets_heads_before_positions():
    attention = Attention(32, 4, 2, 8, RotaryEmbedding(8, 16, 1e4))
    shapes = []
    attention.core = lambda q, k, v, mask: shapes.append((q.shape, k.shape, v.shape)) or q
    assert attention(torch.randn(3, 16, 32)).shape == (3, 16, 32)
    assert shapes == [((3, 4, 16, 8), (3, 2, 16, 8), (3, 2, 16, 8))]


def test_feed_forward_formula():
    layer, x = FeedForward(8, 24), torch.randn(2, 3, 8)
    gate = x @ layer.w1.weight.T
    expected = (gate / (1 + (-gate).exp()) * (x @ layer.w3.weight.T)) @ layer.w2.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_the_head_returns_logits_or_the_sum_of_losses():
    torch.manual_seed(0)
    head, hidden = OutputHead(8, 32), torch.randn(2, 5, 8)
    labels = torch.randint(0, 32, (2, 5))
    labels[0, :3] = -100
    logits = head(hidden)
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = head(hidden, labels)
    assert logits.shape == (2, 5, 32) and loss.shape == ()
    torch.testing.assert_close(loss, -picked[labels != -100].sum())
    assert head.bfloat16()(hidden.bfloat16(), labels).dtype == torch.float32
    assert head.double()(hidden.double(), labels).dtype == torch.float64


def test_compiled_layers_give_the_same_numbers():
    torch.manual_seed(0)
    norm = RMSNorm(64, eps=1e-5)
    compiled = torch.compile(copy.deepcopy(norm), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, 64)
    torch.testing.assert_close(compiled(x), norm(x))
