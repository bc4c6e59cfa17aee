"""Follow CONTRIBUTING's steps "Add a model" in an empty folder, and train the result for one step.

The example is a Llama whose blocks compute attention and feed-forward in parallel, as GPT-J does.
"""

import re

import pytest

from tests.distributed.parity import ROOT, options, run_cell
from tests.harness.rank_pool import run_ranks

FILES = {
    "model.py": """
from torch import nn

from torchtitan_like.models.layers.attention import Attention
from torchtitan_like.models.layers.decoder import Decoder, FeedForward
from torchtitan_like.models.layers.norm import RMSNorm
from torchtitan_like.models.layers.rotary import RotaryEmbedding


class ParallelBlock(nn.Module):
    def __init__(self, args, rotary):
        super().__init__()
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(
            args.dim, args.n_heads, args.n_kv_heads, args.head_dim, rotary
        )
        self.feed_forward = FeedForward(args.dim, 4 * args.dim)

    def forward(self, x, positions=None, mask=None):
        normed = self.norm(x)
        return x + self.attention(normed, positions, mask) + self.feed_forward(normed)


class Parallel(Decoder):
    def __init__(self, args):
        rotary = RotaryEmbedding(args.head_dim, args.max_seq_len, theta=1e4)
        super().__init__(args, lambda layer: ParallelBlock(args, rotary))
""",
    "flavors.py": """
from dataclasses import dataclass

from torchtitan_like.models import InitRule
from torchtitan_like.models.cost import (
    LayerCost,
    attention_params,
    decoder_cost,
    feed_forward_params,
)


@dataclass(frozen=True)
class ParallelArgs:
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 2048
    max_seq_len: int = 1024
    norm_eps: float = 1e-5
    enable_weight_tying: bool = False
    attn_type: str = "sdpa"
    attn_mask_type: str = "causal"

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


FLAVORS = {"tiny": ParallelArgs()}


def check(args):
    if args.dim % (2 * args.n_heads):
        return [f"dim = {args.dim}: expected a multiple of 2 x n_heads = {2 * args.n_heads}"]
    return []


def init_table(args):
    return (
        ("*norm.weight", InitRule("ones")),
        ("*", InitRule("normal", std=0.02)),
    )


def cost(args):
    query_dim, key_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    attention = attention_params(args.dim, query_dim, key_dim)
    network = feed_forward_params(args.dim, 4 * args.dim)
    layer = LayerCost(attention + network + args.dim, attention_width=2 * query_dim)
    return decoder_cost(args, [layer] * args.n_layers)
""",
    "sharding.py": """
from torchtitan_like.models.decoder_tables import decoder_constraints

SHARDING = (
    ("tok_embeddings.weight", "vocab_embedding"),
    ("layers.*.norm.weight", "norm"),
    ("layers.*.attention.w[qkv].weight", "column"),
    ("layers.*.attention.wo.weight", "row"),
    ("layers.*.feed_forward.w[13].weight", "column"),
    ("layers.*.feed_forward.w2.weight", "row"),
    ("norm.weight", "norm"),
    ("output.weight", "output"),
)


def constraints(args):
    return decoder_constraints(args, args.n_kv_heads)
""",
    "hf.py": """
NAMES = tuple(
    (name, f"transformer.{name}")
    for name in (
        "tok_embeddings.weight",
        "layers.{}.norm.weight",
        *(f"layers.{{}}.attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")),
        *(f"layers.{{}}.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
        "norm.weight",
        "output.weight",
    )
)


def hf_names(args):
    return NAMES


def hf_config(args):
    return {"model_type": "parallel", "hidden_size": args.dim}
""",
    "__init__.py": """
from parallel_model import flavors, hf, sharding
from parallel_model.model import Parallel
from torchtitan_like.models import ModelSpec, register

register(
    ModelSpec(
        name="parallel",
        args_type=flavors.ParallelArgs,
        flavors=flavors.FLAVORS,
        build=Parallel,
        init_table=flavors.init_table,
        cost=flavors.cost,
        constraints=sharding.constraints,
        check=flavors.check,
        sharding=sharding.SHARDING,
        hf_names=hf.hf_names,
        hf_config=hf.hf_config,
    )
)
""",
}


def documented_files():
    """Return the files that the numbered steps of CONTRIBUTING name, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## Add a model\n(.*?)^## ", text, re.MULTILINE | re.DOTALL).group(1)
    return re.findall(r"^\d+\. `(\w+\.py)`", section, re.MULTILINE)


def test_documented_steps_name_every_file_of_a_model():
    assert [*documented_files(), "__init__.py"] == list(FILES)
    models = ROOT / "torchtitan_like/models"
    families = [path.parent for path in models.glob("*/flavors.py")]
    names = ["deepseek_v3", "dense", "gpt_oss", "llama4"]
    assert sorted(family.name for family in families) == names
    for family in families:
        assert {path.name for path in family.glob("*.py")} == set(FILES), family


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, {}), (2, {"parallelism.tensor_parallel_degree": 2})],
    ids=["one-rank", "tp-2"],
)
def test_model_added_by_the_documented_steps_trains(tmp_path, world_size, layout, monkeypatch):
    folder = tmp_path / "parallel_model"
    folder.mkdir()
    for name in (*documented_files(), "__init__.py"):
        (folder / name).write_text(FILES[name])
    argv = options(
        str(tmp_path / "run"),
        "float32",
        **{
            "experimental.custom_import": "parallel_model",
            "model.name": "parallel",
            "model.flavor": "tiny",
            "training.steps": 1,
            **layout,
        },
    )
    index = argv.index("--model.args.multiple_of")  # an argument of llama3 only
    monkeypatch.syspath_prepend(str(tmp_path))  # ranks have the search path of the test
    trace = run_ranks(run_cell, world_size, argv[:index] + argv[index + 2 :])[0]
    assert trace.loss == pytest.approx([7.6], abs=0.2)  # ln 2048 = 7.62
    assert len(trace.gradients[0]) == 2 * 8 + 3
    assert all(abs(gradient).max() > 0 for gradient in trace.gradients[0].values())
