"""Count what each mode of activation checkpointing stores and recomputes."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_like.config.sections_scale import ActivationCheckpoint
from torchtitan_like.distributed.activation import apply_activation_checkpointing
from torchtitan_like.distributed.initialize import initialize
from torchtitan_like.distributed.parallelize import compile_blocks, find_blocks
from torchtitan_like.models.spec import get_spec, resolve_args

NUM_BLOCKS = 4
LINEARS = 7  # linear layers of a block: wq wk wv wo w1 w2 w3
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default"


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[str(function).removeprefix("aten.")] += 1
        return function(*args, **(kwargs or {}))


def backward(*, compiled=False, **section):
    """Return the operators of backward, the number of stored elements, and the gradients."""
    torch._dynamo.reset()
    spec = get_spec("llama3")
    sizes = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "n_layers": NUM_BLOCKS}
    args = resolve_args(spec, "debugmodel", sizes)
    model = spec.build(args)
    initialize(model, spec.init_table(args), seed=0)
    blocks = find_blocks(model, spec)
    apply_activation_checkpointing(blocks, ActivationCheckpoint(**section))
    if compiled:
        compile_blocks(blocks, "aot_eager")
    tokens = torch.arange(64).view(2, 32)
    stored = {}

    def store(tensor):
        stored[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        loss = model(tokens, tokens)
    with Count() as count:
        loss.backward()
    elements = sum(n for storage, n in stored.items() if storage not in weights)
    return count.operators, elements, [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def plain():
    return backward(mode="none")


@pytest.mark.parametrize(
    ("section", "num_mm", "num_attention"),
    [
        # Recomputed matrix products and attentions, summed over all blocks
        ({"mode": "full"}, LINEARS * NUM_BLOCKS, NUM_BLOCKS),
        ({"mode": "selective", "selective_ac_option": "1"}, LINEARS * NUM_BLOCKS, NUM_BLOCKS),
        ({"mode": "selective", "selective_ac_option": "2"}, LINEARS * NUM_BLOCKS // 2, NUM_BLOCKS // 2),
        ({"mode": "selective", "selective_ac_option": "3"}, LINEARS * 2, 2),
        # Every second product of a block: 3 of 7
        ({"mode": "selective", "selective_ac_option": "op"}, 3 * NUM_BLOCKS, 0),
        # Also all products with the shape of w2, and of the six others the second, fourth and sixth
        (
            {"mode": "selective", "selective_ac_option": "op",
             "per_op_sac_force_recompute_mm_shapes_by_fqns": ["feed_forward.w2"]},
            4 * NUM_BLOCKS,
            0,
        ),
    ],
)  # fmt: skip
def test_recomputed_operations(plain, section, num_mm, num_attention):
    operators, _, gradients = backward(**section)
    assert operators["mm.default"] - plain[0]["mm.default"] == num_mm
    assert operators[ATTENTION] == num_attention
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain[2], strict=True)), (
        "expected equal gradients"
    )


def test_early_stop_skips_unneeded_recomputation():
    """It skips the last product of a block: the result is the stored input of the next block."""
    whole = backward(mode="full")[0]["mm.default"]
    assert whole - backward(mode="full", early_stop=True)[0]["mm.default"] == NUM_BLOCKS


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [({"mode": "full"}, {"mode": "selective", "selective_ac_option": "2"}),
     ({"mode": "selective", "selective_ac_option": "2"}, {"mode": "none"})],
)  # fmt: skip
def test_more_recomputation_stores_less(stronger, weaker):
    assert backward(**stronger)[1] < 0.8 * backward(**weaker)[1]


@pytest.mark.parametrize(
    ("budget", "minimum", "maximum"),
    [(1.0, 0, 0), (0.5, 1, LINEARS), (0.0, LINEARS - 1, LINEARS - 1)],
)
def test_the_compiler_uses_the_memory_budget(plain, budget, minimum, maximum):
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=1.0):
        operators, _, gradients = backward(
            compiled=True, mode="memory_budget", memory_budget=budget
        )
    assert (
        minimum * NUM_BLOCKS
        <= operators["mm.default"] - plain[0]["mm.default"]
        <= maximum * NUM_BLOCKS
    )
    for gradient, expected in zip(gradients, plain[2], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_compiled_blocks_recompute_the_same_operations(plain):
    operators = backward(compiled=True, mode="selective", selective_ac_option="op")[0]
    assert operators["mm.default"] - plain[0]["mm.default"] == 3 * NUM_BLOCKS
