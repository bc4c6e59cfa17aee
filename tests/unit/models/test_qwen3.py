"""Qwen3: FLOPs by hand, norms of heads, and training of the debug model."""

import copy
import math
from fnmatch import fnmatchcase

import pytest
import torch

from tests.distributed import parity
from tests.distributed.parity import short_documents
from tests.harness.rank_pool import run_ranks
from tests.unit.models.families import QWEN3, UNTIED
from torchtitan_like.models import resolve_args
from torchtitan_like.util.jsonl import read_rows

QWEN, build, perturb, some_tokens = QWEN3.spec, QWEN3.build, QWEN3.perturb, QWEN3.some_tokens


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


def test_norms_of_heads_have_their_own_role():
    """Their weights are replicated, while heads are sharded."""
    _, model = build()
    roles = {
        name: role
        for name, _ in model.named_parameters()
        for pattern, role in QWEN.sharding
        if fnmatchcase(name, pattern)
    }
    heads = {name for name, role in roles.items() if role == "head_norm"}
    assert heads == {f"layers.{i}.attention.{x}_norm.weight" for i in range(3) for x in "qk"}


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
