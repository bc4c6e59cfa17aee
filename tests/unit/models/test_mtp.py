"""Multi-token prediction of DeepSeek-V3: equations 21 to 25, labels within documents, files."""

import logging

import pytest
import torch
from torch.nn import functional as F

from tests.harness.hf_weights import load_hf
from tests.unit.models.families import DEEPSEEK_V3, SIGMOID
from torchtitan_like.checkpoint.errors import with_checkpoint_errors
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.inference.generation import Sampling, generate
from torchtitan_like.models import resolve_args
from torchtitan_like.models.layers.mtp import shift_labels, shift_tokens
from torchtitan_like.models.spec import needs_positions
from torchtitan_like.util.labels import IGNORED_LABEL

DEEPSEEK, build, perturb = DEEPSEEK_V3.spec, DEEPSEEK_V3.build, DEEPSEEK_V3.perturb
some_tokens = DEEPSEEK_V3.some_tokens
# Two samples of documents with 5, 1, 6 and 3, 9 tokens.
POSITIONS = torch.tensor([[*range(5), 0, *range(6)], [*range(3), *range(9)]])


def some_batch(args):
    tokens = some_tokens(args, seq=13)
    labels = tokens[:, 1:].clone()
    labels[0, 4] = IGNORED_LABEL  # the start of a document
    labels[1, 8:10] = IGNORED_LABEL
    return tokens[:, :-1], labels


# ---- the loss


def norm(module, x):
    return module.weight * x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt()


def is_own_document(sample, first, last):
    """Return True if no document starts after token `first` up to token `last`."""
    return all(POSITIONS[sample, i] > 0 for i in range(first + 1, last + 1))


def reference(args, model, tokens, labels):
    """Return the sums of the next-token loss and of all depths, one position at a time."""
    positions = mask = None
    if args.attn_mask_type == "block_causal":
        positions = POSITIONS
        mask = model.attention_mask(positions, torch.float64, tokens.shape[1])
    embeddings = model.tok_embeddings.weight
    h = embeddings[tokens]
    for layer in range(args.n_layers):
        h = model.layers[str(layer)](h, positions, mask)
    h = norm(model.norm, h)
    logits = h @ model.output.weight.T
    own = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    mtp = 0.0
    batch, seq = tokens.shape
    for depth in range(1, args.num_mtp_layers + 1):
        block = model.layers[str(args.n_layers + depth - 1)]
        rows = []
        for sample in range(batch):
            for i in range(seq):
                token = tokens[sample, i + depth] if i + depth < seq else 0
                parts = norm(block.enorm, embeddings[token]), norm(block.hnorm, h[sample, i])
                rows.append(block.eh_proj.weight @ torch.cat(parts))
        x = torch.stack(rows).view_as(h)
        x = x + block.attention(norm(block.attention_norm, x), positions, mask)
        x = x + block.moe(norm(block.ffn_norm, x))
        h = norm(block.norm, x)
        for sample in range(batch):
            for i in range(seq - depth):
                label = labels[sample, i + depth]
                if label != IGNORED_LABEL and is_own_document(sample, i, i + depth):
                    logits = model.output.weight @ h[sample, i]
                    mtp = mtp + logits.logsumexp(0) - logits[label]
    return own, mtp


@pytest.mark.parametrize("mask_type", ["causal", "block_causal"])
@pytest.mark.parametrize("depths", [1, 2])
def test_the_loss_and_its_gradients_equal_the_equations(depths, mask_type):
    overrides = {"num_mtp_layers": depths, "attn_mask_type": mask_type, "mtp_loss_weight": 0.7}
    args, model = build(SIGMOID | overrides, dtype=torch.float64)
    perturb(model)
    tokens, labels = some_batch(args)
    own, mtp = reference(args, model, tokens, labels)
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(own + 0.7 / depths * mtp, parameters.values())
    loss = model(tokens, labels, POSITIONS)
    assert loss.own.item() == pytest.approx(own.item(), rel=1e-12)
    assert loss.mtp.item() == pytest.approx(mtp.item() / depths, rel=1e-12)
    actual = torch.autograd.grad(loss.own + loss.weight * loss.mtp, parameters.values())
    for name, gradient, other in zip(parameters, actual, expected, strict=True):
        assert (gradient - other).norm() <= 1e-10 * other.norm(), name
        assert other.norm() > 0, name


def test_labels_are_shifted_within_documents():
    """Document A has tokens 10 to 13, B has 20 to 22. B continues after the sample."""
    tokens = torch.tensor([[10, 11, 12, 13, 20, 21, 22]])
    labels = torch.tensor([[11, 12, 13, IGNORED_LABEL, 21, 22, 23]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    no = IGNORED_LABEL
    assert shift_tokens(tokens, 1).tolist() == [[11, 12, 13, 20, 21, 22, 0]]
    assert shift_labels(labels, 1, positions).tolist() == [[12, 13, no, no, 22, 23, no]]
    assert shift_labels(labels, 2, positions).tolist() == [[13, no, no, no, 23, no, no]]
    assert shift_labels(labels, 2, None).tolist() == [[13, no, 21, 22, 23, no, no]]
    # With the start of a document as a label, the tokens before it in A predict it too.
    labels[0, 3] = 20
    assert shift_labels(labels, 1, positions).tolist() == [[12, 13, 20, no, 22, 23, no]]


def test_batches_have_positions_with_either_mask():
    for changes, expected in (({}, False), ({"num_mtp_layers": 1}, True)):
        args = resolve_args(DEEPSEEK, "debugmodel", changes)
        assert args.attn_mask_type == "causal" and needs_positions(args) is expected


@pytest.mark.parametrize("mask_type", ["causal", "block_causal"])
def test_evaluation_and_generation_ignore_it(mask_type):
    overrides = SIGMOID | {"attn_mask_type": mask_type}
    args, model = build(overrides | {"num_mtp_layers": 2})
    _, plain = build(overrides)
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens, labels = some_batch(args)
    positions = POSITIONS if mask_type == "block_causal" else None
    assert torch.equal(model(tokens), plain(tokens))
    model.eval()
    loss = plain(tokens, labels, positions)
    assert torch.equal(model(tokens, labels, POSITIONS), loss)
    limits = {"num_tokens": 4, "sampling": Sampling(), "context": 8}
    texts = [generate(each, [1, 2, 3], **limits) for each in (model, plain)]
    assert texts[0] == texts[1]


# ---- sizes


def test_number_of_parameters_and_flops():
    """The number equals the FP8 and BF16 elements of the published files, including copies."""
    args = resolve_args(DEEPSEEK, "671B", {"num_mtp_layers": 1})
    with torch.device("meta"):
        model = DEEPSEEK.build(args)
    total = sum(p.numel() for p in model.parameters())
    assert DEEPSEEK.num_params(args) == total == 682_636_472_320
    copies = 2 * args.vocab_size * args.dim
    assert total + copies == 680_571_043_840 + 3_918_786_560
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    assert DEEPSEEK.num_active_params(args) == total - experts * 248 // 256 == 38_240_382_976
    plain = resolve_args(DEEPSEEK, "671B", {})
    more = DEEPSEEK.flops_per_token(args, 4096) - DEEPSEEK.flops_per_token(plain, 4096)
    weights = 38_240_382_976 - 37_552_282_624 + args.vocab_size * args.dim
    assert more == 6 * (weights + 128 * (192 + 128) * 4096)


def test_a_dense_model_may_predict_with_experts():
    sizes = {"num_mtp_layers": 1, "n_dense_layers": 3}
    args, model = build(sizes)
    assert DEEPSEEK.num_params(args) == sum(p.numel() for p in model.parameters())
    assert model.layers["2"].moe is None and model.layers["3"].moe is not None
    assert DEEPSEEK.constraints(args)["n_experts"] == 8


# ---- Hugging Face


def export(folder, args, model, repo_root):
    """Write the folder for transformers, as a run does."""
    state = {name: tensor.detach() for name, tensor in ModelState([model]).state_dict().items()}
    write_export(
        folder,
        state,
        rows=DEEPSEEK.hf_names(args),
        tied=DEEPSEEK.tied(args),
        copies=DEEPSEEK.hf_copies(args),
        dtype=None,
        group=HostGroup.alone(),
    )
    write_folder(
        folder,
        config=DEEPSEEK.hf_config(args),
        dtype=torch.float32,
        assets=repo_root / "tests/assets/tokenizer",
        bos=None,
        eos=None,
    )
    return state


def load(folder, args, model):
    return load_hf(
        folder,
        ModelState([model]).state_dict(),
        rows=DEEPSEEK.hf_names(args),
        tied=DEEPSEEK.tied(args),
        quantized=False,
        group=with_checkpoint_errors(HostGroup.alone()),
        alternative_rows=DEEPSEEK.hf_alternative_names(args),
        unread=DEEPSEEK.hf_unread(args),
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_files_have_the_published_names(tmp_path, repo_root, is_tied, caplog):
    from safetensors.torch import load_file

    overrides = SIGMOID | {"num_mtp_layers": 2, "enable_weight_tying": is_tied}
    args, model = build(overrides | {"num_experts": 4, "n_layers": 2})
    perturb(model)
    state = export(tmp_path, args, model, repo_root)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.3."
    names = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
    block = {
        name.removeprefix("model.layers.1.")
        for name in stored
        if name.startswith("model.layers.1.")
    }
    assert names - block == {
        "embed_tokens.weight",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
    }
    assert block < names
    embedding = stored["model.embed_tokens.weight"]
    assert torch.equal(stored[prefix + "embed_tokens.weight"], embedding)
    head = embedding if is_tied else stored["lm_head.weight"]
    assert torch.equal(stored[prefix + "shared_head.head.weight"], head)
    assert torch.equal(stored[prefix + "eh_proj.weight"], state["layers.3.eh_proj.weight"])
    _, other = build(overrides | {"num_experts": 4, "n_layers": 2})
    with caplog.at_level(logging.INFO):
        report = load(tmp_path, args, other)
    assert len(report.unused) == 4 and not report.missing
    for name, tensor in ModelState([other]).state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert not config_differences(tmp_path, DEEPSEEK.hf_config(args))


def test_transformers_ignores_the_layer(tmp_path, repo_root):
    """With the published number of layers, no tensor is missing or unexpected."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layers": 61, "dim": 16, "moe_inter_dim": 8, "inter_dim": 8, "num_experts": 4}
    args, model = build(SIGMOID | sizes | {"vocab_size": 2048, "num_mtp_layers": 1})
    export(tmp_path, args, model, repo_root)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert theirs.config.num_nextn_predict_layers == 1
    assert not any(report.values()), report
    tokens = some_tokens(args)
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5


def test_a_model_without_it_skips_the_layer(tmp_path, repo_root):
    sizes = {"n_layers": 61, "dim": 16, "moe_inter_dim": 8, "inter_dim": 8, "num_experts": 4}
    args, model = build(SIGMOID | sizes | {"num_mtp_layers": 1})
    state = export(tmp_path, args, model, repo_root)
    plain_args, plain = build(SIGMOID | sizes)
    report = load(tmp_path, plain_args, plain)
    assert report.unused and all(name.startswith("model.layers.61.") for name in report.unused)
    for name, tensor in ModelState([plain]).state_dict().items():
        assert torch.equal(tensor, state[name]), name
