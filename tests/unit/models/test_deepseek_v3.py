"""DeepSeek-V3: YaRN, the selection bias, and generated text."""

import torch

from tests.unit.models.families import DEEPSEEK_V3 as FAMILY
from tests.unit.models.families import SIGMOID
from torchtitan_like.inference.generation import Sampling, generate
from torchtitan_like.models.spec import fit_positions

build, perturb, some_tokens = FAMILY.build, FAMILY.perturb, FAMILY.some_tokens


def test_yarn_does_not_depend_on_the_length_of_the_tables():
    args, model = build()
    _, short = build({"max_seq_len": 16})
    assert fit_positions(args, 16).rope_factor == args.rope_factor == 40
    tokens = some_tokens(args, seq=16)
    assert torch.equal(model(tokens), short(tokens))
    _, plain = build({"rope_factor": 1.0})
    assert not torch.allclose(model(tokens), plain(tokens), rtol=1e-3)


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


def test_generates_text():
    _, model = build({"vocab_size": 64, **SIGMOID})
    continuation = generate(model, [1, 2, 3], num_tokens=9, sampling=Sampling(), context=128)
    ids = torch.tensor([[1, 2, 3, *continuation.ids]])
    with torch.no_grad():
        expected = [model(ids[:, :end])[0, -1].argmax().item() for end in range(3, 12)]
    assert continuation.ids == expected
