"""Dense decoders of the Hub on several layouts equal one rank: biases, norms, windows, scaled RoPE."""

import functools

import pytest

from tests.distributed.parity import compare, options, run_cell
from tests.distributed.test_matrix import CP, LAYOUTS, PP, TP
from tests.harness.rank_pool import run_ranks

COMMON = {
    "model.name": "hf",
    "model.args.head_dim": 12,
    "model.args.hidden_dim": 48,
    "model.args.vocab_size": 2048,
    "model.args.init_std": 0.1,
}
MODELS = {
    # Biases of queries, keys, and values; a window in the last layer, longer than a document.
    "qwen2": {
        "model.flavor": "qwen2",
        "model.args.sliding_window_size": 6,
        "model.args.first_window_layer": 1,
    },
    # All biases, and dynamic frequencies of sequences longer than 16 tokens.
    "llama": {
        "model.flavor": "llama",
        "model.args.attention_bias": "true",
        "model.args.mlp_bias": "true",
        "model.args.rope_type": "dynamic",
        "model.args.rope_factor": 4,
        "model.args.rope_original_seq_len": 16,
    },
    "qwen3": {
        "model.flavor": "qwen3",
        "model.args.attention_bias": "true",
        "model.args.sliding_window_size": 6,
        "model.args.rope_type": "yarn",
        "model.args.rope_factor": 4,
        "model.args.rope_original_seq_len": 8,
        "model.args.rope_attention_factor": 1.1,
        "model.args.attn_mask_type": "block_causal",
    },
}
EVERY_RUN = [
    ("qwen2", "tp"),
    ("qwen2", "pp-1f1b"),
    ("qwen2", "cp-allgather"),
    ("llama", "fsdp"),
    ("llama", "tp"),
    ("qwen3", "tp"),
]
NIGHTLY = [
    (model, layout)
    for model in MODELS
    for layout in ("fsdp", "tp-no-sp", "pp-1f1b", "cp-allgather", "cp-ulysses", "fsdp-tp", "tp-cp")
    if (model, layout) not in EVERY_RUN and not ("cp" in layout and model == "llama")
]


def settings(folder, model, **overrides):
    argv = options(folder, "float64", **{**COMMON, **MODELS[model], **overrides})
    multiple_of = argv.index("--model.args.multiple_of")  # of Llama 3
    return argv[:multiple_of] + argv[multiple_of + 2 :]


@functools.cache
def reference(folder, model):
    return run_ranks(run_cell, 1, settings(folder, model))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hf-family")


@pytest.mark.parametrize(
    ("model", "layout"),
    [*EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)],
)
def test_equals_one_rank(folder, model, layout):
    ranks, cell = LAYOUTS[layout]
    expected = reference(str(folder / f"one-rank-{model}"), model)
    data_ranks = ranks // (cell.get(TP, 1) * cell.get(PP, 1) * cell.get(CP, 1))
    argv = settings(
        str(folder / f"{model}-{layout}"),
        model,
        **{**cell, "training.local_batch_size": 8 // data_ranks},
    )
    compare(expected, run_ranks(run_cell, ranks, argv, timeout=120)[0], "float64")
