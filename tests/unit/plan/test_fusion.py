"""Compiled blocks run the kernels and keep the results that torch.compile's do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.rank_pool import run_ranks
from torchtitan_like.config import JobConfig
from torchtitan_like.distributed.activation import apply_activation_checkpointing
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan.clusters import Cluster
from torchtitan_like.plan.durations import durations
from torchtitan_like.plan.fusion import find_needed, find_repeated, fused_bytes, fused_memory
from torchtitan_like.plan.gpus import Gpu
from torchtitan_like.plan.record import Alloc, Free, Kind, Pass, Recorder, Recording, WorkItem


class Written:
    """A recording that a test writes step by step. Each result has 100 bytes.

    Tensor 1 exists from the start.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self._allocate(1, "layers.0", "forward")

    def step(
        self,
        op: str,
        *reads: int,
        to: int,
        module: str = "layers.0",
        pass_: Pass = "forward",
        num_bytes: int = 100,
    ) -> None:
        kind: Kind = "matmul" if op == "mm" else "memory"
        if not op.endswith("_"):
            self._allocate(to, module, pass_)
        item = WorkItem(
            kind,
            op,
            0,
            module,
            pass_,
            num_bytes=200,
            shapes=((128, 256), (256, 128)) if kind == "matmul" else (),
            dtype="bfloat16",
            reads=tuple((read, 100) for read in reads),
            writes=((to, num_bytes),),
        )
        self.recording.work.append(item)

    def free(self, *identities: int) -> None:
        for identity in identities:
            self.recording.events.append(Free(identity, len(self.recording.work)))

    def _allocate(self, identity: int, module: str, pass_: Pass) -> None:
        at = len(self.recording.work)
        self.recording.events.append(
            Alloc(identity, 100, 0, "activations", "mul", module, pass_, False, at)
        )

    def lifetimes(self) -> dict[int, int]:
        """Return, of compiled blocks, after how many work items each result that was there ends."""
        events = fused_memory(self.recording).events
        return {event.id: event.at for event in events if isinstance(event, Free)}


# ---- kernels


def chain() -> Written:
    """A matrix product, three kernels in a row, and a matrix product that reads the last result."""
    written = Written()
    written.step("mm", 1, to=2)
    written.step("silu", 2, to=3)
    written.step("mul", 3, to=4)
    written.step("mul", 4, to=5)
    written.step("mm", 5, to=6)
    return written


def freed(written: Written, **at: int) -> Recording:
    """Free tensors after so many work items: `t3=3`."""
    written.recording.events += [Free(int(name[1:]), number) for name, number in at.items()]
    return written.recording


def test_fused_kernels_read_the_first_input_and_write_the_last_result() -> None:
    assert fused_bytes(freed(chain(), t3=3, t4=4, t5=5)) == {1: 0, 2: 0, 3: 200}


def test_what_lives_longer_is_written_and_outside_of_blocks_nothing_is_fused() -> None:
    recording = freed(chain(), t4=4, t5=5)  # backward needs tensor 3
    assert fused_bytes(recording)[3] == 300
    recording.work = [item._replace(module="output") for item in recording.work]
    assert fused_bytes(recording) == {}


def test_a_reduction_to_a_few_numbers_ends_a_kernel() -> None:
    recording = freed(chain(), t3=3, t4=4, t5=5)
    recording.work[2] = recording.work[2]._replace(op="max", writes=((4, 4),))
    # The first kernel reads 100 bytes; its tensor is not needed later. 4 bytes are read and freed.
    recording.work[3] = recording.work[3]._replace(reads=((2, 100), (4, 4)))
    assert fused_bytes(recording) == {1: 0, 2: 104, 3: 204}


def test_a_block_computes_an_expression_once() -> None:
    written = Written()
    written.step("mm", 1, to=2)
    written.step("silu", 2, to=3)
    written.step("mul", 3, to=4)
    written.step("silu", 2, to=5)  # again
    written.step("mm", 5, to=6)
    recording = freed(written, t3=3, t4=3, t5=5)
    assert find_repeated(recording) == ({3}, {5: 3})
    # The matrix product at the end reads tensor 3. Nobody reads tensor 4, so it is not computed.
    assert fused_bytes(recording) == {1: 200, 2: 0, 3: 0}
    in_place = {"op": "mul_", "reads": ((2, 100),), "writes": ((2, 100),)}
    recording.work[2] = recording.work[2]._replace(**in_place)
    assert find_repeated(recording) == (set(), {})  # tensor 2 is another one by then
    for index in (2, 3):
        recording.work[index] = recording.work[index]._replace(module="layers.1.norm")
    assert find_repeated(recording) == (set(), {})


def test_a_result_that_is_changed_in_place_is_not_the_first_copy() -> None:
    written = Written()
    written.step("mm", 1, to=2)
    written.step("silu", 2, to=3)
    written.step("mul", 3, to=4)
    written.step("silu", 2, to=5)
    written.step("mm", 4, to=7)
    written.step("mul_", 5, 7, to=5)
    written.step("mm", 5, to=6)
    recording = freed(written, t2=7, t3=7, t4=7, t5=7, t7=7)
    repeated, first_copy = find_repeated(recording)
    assert not repeated and find_needed(recording, first_copy) == [True] * 7


def test_fusion_saves_launches() -> None:
    gpu = Gpu("toy", "Toy", 80, 1.0, 4, 100, 0, {"bfloat16": 100.0}, memory_share=0.5)
    cluster = Cluster("toy", "Toy", "", 8, 50, 10, 0.5, 0.0)
    recording = freed(chain(), t3=3, t4=4, t5=5)
    saved = sum(durations(recording, gpu, cluster)) - sum(
        durations(recording, gpu, cluster, fuses=True)
    )
    assert saved == pytest.approx(2 * gpu.launch_us * 1e-6 + 400 / 0.5e12)


# ---- memory


def test_a_result_within_a_kernel_is_never_in_memory() -> None:
    written = chain()
    written.step("mm", 6, to=7)
    written.free(2, 3, 4, 5, 6)
    # The product's result is read by the first kernel, and that of the last one by a product.
    assert written.lifetimes() == {2: 2, 5: 5, 6: 6}


def test_what_nothing_reads_is_neither_computed_nor_in_memory() -> None:
    written = chain()
    written.free(2, 3, 4, 5)
    assert find_needed(written.recording) == [True] * 5  # tensor 6 stays
    written.free(6)
    assert find_needed(written.recording) == [False] * 5
    assert fused_bytes(written.recording) == dict.fromkeys(range(5), 0)
    assert written.lifetimes() == {}
    for index in (2, 4):  # outside of a compiled block, and a change of what exists
        recording = freed(chain(), t2=5, t3=5, t4=5, t5=5, t6=5)
        changed = {2: {"module": "output"}, 4: {"op": "mm", "writes": ((1, 100),)}}[index]
        recording.work[index] = recording.work[index]._replace(**changed)
        assert find_needed(recording)[: index + 1] == [True] * (index + 1)


def activation_function(second_pass: str = "mul") -> Written:
    """silu(x @ w): the backward reads silu's result and its operand, and a last product."""
    written = Written()
    written.step("mm", 1, to=2)
    written.step("silu", 2, to=3)
    written.step("mm", 3, to=4)
    written.step("mm", 4, to=5, pass_="backward")
    written.step(second_pass, 5, 3, to=6, pass_="backward")
    written.step("mul", 6, 2, to=7, pass_="backward")
    written.step("mm", 7, to=8, pass_="backward")
    written.free(3, 2, 5, 6, 7)
    return written


def test_backward_applies_an_activation_function_again() -> None:
    # Tensor 3 ends with the product that reads it in the forward pass; its operand 2 stays.
    assert activation_function().lifetimes() == {3: 3, 2: 6, 5: 5, 7: 7}


def test_a_result_that_a_product_of_the_backward_reads_stays() -> None:
    assert activation_function("mm").lifetimes()[3] == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda written: written.step("add_", 2, to=2, pass_="backward"),
        lambda written: written.free(2),
    ],
    ids=["changed in place", "freed"],
)
def test_nothing_is_computed_again_from_operands_that_are_gone(
    change: Callable[[Written], None],
) -> None:
    written = Written()
    written.step("mm", 1, to=2)
    written.step("silu", 2, to=3)
    written.step("mm", 3, to=4)
    change(written)
    written.step("mul", 3, to=5, pass_="backward")
    num_steps = len(written.recording.work)
    written.free(3)
    assert written.lifetimes()[3] == num_steps


def test_an_operand_is_kept_for_a_result_that_is_computed_again() -> None:
    """Nothing else of the backward reads tensor 2, which the eager model keeps until the end."""
    written = Written()
    written.step("mm", 1, to=2)
    written.step("silu", 2, to=3)
    written.step("mm", 3, to=4)
    written.step("mul", 3, to=5, pass_="backward")
    written.step("mm", 5, to=6, pass_="backward")
    written.free(2, 3)
    assert written.lifetimes() == {2: 4, 3: 3}


def test_a_result_that_its_kernel_takes_as_an_argument_is_computed_again() -> None:
    written = Written()
    written.step("mm", 1, to=2)
    written.step("addcmul", 2, 3, to=3)  # out=
    written.step("silu", 3, to=4)
    written.step("mm", 4, to=5)
    written.free(3)
    written.step("mul", 4, to=6, pass_="backward")
    written.step("mm", 6, to=7, pass_="backward")
    written.free(2, 4)
    # Tensor 2 stays for the backward, which computes 3 and then 4 again.
    assert written.lifetimes() == {2: 5, 4: 4}


def test_a_saved_result_that_no_backward_reads_ends_with_the_forward_pass() -> None:
    written = Written()
    written.step("mm", 1, to=2)
    written.step("add", 2, 1, to=3)
    written.step("mul", 3, to=4, module="layers.1")
    written.step("add", 2, 1, to=5, pass_="recomputation")  # its result is not used
    written.step("mm", 4, to=6, pass_="backward")
    written.free(5, 2, 3)
    # Tensor 3 goes from block to block: it stays as long as in the eager model.
    assert written.lifetimes() == {2: 2, 3: 5}


def test_results_outside_of_blocks_and_marks_stay() -> None:
    written = Written()
    written.step("mm", 1, to=2, module="output")
    written.step("silu", 2, to=3, module="output")
    written.step("mul", 3, to=4, module="output")
    written.free(3, 2)
    assert written.lifetimes() == {3: 3, 2: 3}
    written = chain()
    written.free(3, 4)
    written.recording.mark("step 1")
    events = fused_memory(written.recording)
    (mark,) = events.marks
    assert mark.num_events == len(events.events) == len(written.recording.events) - 4
    assert mark.num_work == 5


# ---- real blocks

CASES = [
    ("llama3", "none", torch.float32, 0),
    ("llama3", "selective", torch.float32, 0),
    pytest.param("llama3", "none", torch.bfloat16, 0, marks=pytest.mark.nightly),
    pytest.param("qwen3", "none", torch.float32, 0, marks=pytest.mark.nightly),
    pytest.param("qwen3", "selective", torch.bfloat16, 0, marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", "none", torch.float32, 0, marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", "selective", torch.float32, 0, marks=pytest.mark.nightly),
    # Experts: torch saves 10 KB of row numbers more, of 26 MB.
    pytest.param("gpt_oss", "none", torch.float32, 10_240, marks=pytest.mark.nightly),
]
TOKENS = (2, 64)


@pytest.mark.parametrize(("family", "mode", "dtype", "more"), CASES)
def test_a_compiled_block_saves_the_bytes_of_a_real_one(
    family: str, mode: str, dtype: torch.dtype, more: int
) -> None:
    # In a process of its own: no process that ran a backward can fork those of other tests.
    ((real, eager, fused),) = run_ranks(saved_bytes, 1, family, mode, dtype)
    assert fused == real - more < eager


def saved_bytes(family: str, mode: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the bytes that a compiled block saves, an eager one, and `fused_memory`."""
    real = saved_by_compiled(*block_and_input(family, mode, dtype))
    return real, *saved_by_rules(*block_and_input(family, mode, dtype))


def block_and_input(family: str, mode: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    spec = get_spec(family)
    model = spec.build(resolve_args(spec, "debugmodel", {"n_layers": 1})).to(dtype)
    model.init_buffers(torch.device("cpu"))
    section = JobConfig().activation_checkpoint.model_copy(
        update={"mode": mode, "selective_ac_option": "op", "preserve_rng_state": False}
    )
    apply_activation_checkpointing({"layers.0": model.layers["0"]}, section)
    dim = model.norm.weight.shape[0]
    return model, torch.randn(*TOKENS, dim, dtype=dtype, requires_grad=True)


MODES = [
    ("llama3", "full"),
    ("llama3", "selective"),
    pytest.param("llama3", "none", marks=pytest.mark.nightly),
    pytest.param("qwen3", "full", marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", "full", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("family", "mode"), MODES)
def test_a_compiled_block_computes_the_products_of_a_real_one(family: str, mode: str) -> None:
    ((real, eager, needed),) = run_ranks(products, 1, family, mode)
    assert real == needed
    assert (needed < eager) == (mode == "full")  # the last product is not computed again


def products(family: str, mode: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the products and attentions of a compiled block, an eager one, and `find_needed`."""
    real = products_of_compiled(*block_and_input(family, mode, torch.float32))
    model, x = block_and_input(family, mode, torch.float32)
    recorder = Recorder("cpu")
    with recorder, recorder.following(nn.ModuleList([model]), ()):
        model.layers["0"](x, None, None).sum().backward()
    work = recorder.recording.work
    needed = zip(work, find_needed(recorder.recording), strict=True)
    return real, count_products(work), count_products([item for item, needs in needed if needs])


def count_products(work: list[WorkItem]) -> Counter[str]:
    return Counter(item.op for item in work if item.kind in ("matmul", "attention"))


def products_of_compiled(model: nn.Module, x: torch.Tensor) -> Counter[str]:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            # An attention that is computed again is an argument of what restores its random state.
            for op in (node.target, *node.args):
                name = op._overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else ""
                if name.endswith("mm") or "attention" in name:
                    found[name] += 1
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=count,
        bw_compiler=count,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    (block,) = model.layers.values()
    block.compile(fullgraph=True, backend=backend)
    block(x, None, None).sum().backward()
    return found


def saved_by_compiled(model: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that a compiled block keeps for its backward, without its input."""
    torch._dynamo.reset()  # after blocks of another length, its graphs would have dynamic shapes
    (block,) = model.layers.values()
    block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    excluded = {t.untyped_storage()._cdata for t in (x, *model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in excluded:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, None, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def saved_by_rules(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that the eager block keeps, and `fused_memory`, without its output."""
    recorder = Recorder("cpu")
    with recorder, recorder.following(nn.ModuleList([model]), ()):
        out = model.layers["0"](x, None, None)
        after = out * 2
        recorder.recording.mark("forward")
        after.sum().backward()
    output = recorder.id_of(out)

    def saved(recording: Recording) -> int:
        alive: dict[int, Alloc] = {}
        for event in recording.events[: recording.marks[0].num_events]:
            if isinstance(event, Free):
                alive.pop(event.id, None)
            elif event.module.startswith("layers.") and event.id != output:
                alive[event.id] = event
        return sum(event.num_bytes for event in alive.values())

    return saved(recorder.recording), saved(fused_memory(recorder.recording))
