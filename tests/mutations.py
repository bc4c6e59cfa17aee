"""Break one line of the core at a time, and check that ./run_tests.sh would fail.

    python -m tests.mutations [NAME ...]

Each mutation is applied to a copy of the repository, in which a part of the daily tests runs. That
part must pass without a mutation and fail with it. All take about 15 minutes on two cores.
tests/unit/harness/test_mutations.py checks that each line still exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.harness.runner import ROOT


class Mutation(NamedTuple):
    """A wrong line. before, after: text in `file` of the package. tests: words for pytest."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    Mutation(
        "the loss is also divided by the micro-batches",
        "step.py",
        "partial(self._pass, num_valid=num_valid)",
        "partial(self._pass, num_valid=num_valid * len(batch.first_samples))",
        "tests/distributed/test_parity.py",
    ),
    Mutation(
        "each rank clips by its own gradient norm",
        "optim/clipping.py",
        "if all_ranks is not None:",
        "if all_ranks is None:",
        "tests/distributed/test_parity.py",
    ),
    Mutation(
        "the warmup is one step late",
        "optim/schedule.py",
        "return step / self.warmup_steps",
        "return (step - 1) / self.warmup_steps",
        "tests/unit/optim/test_schedule.py",
    ),
    Mutation(
        "averages include skipped steps",
        "optim/ema.py",
        "is_added = skip.ne(1)",
        "is_added = skip.ne(2)",
        "tests/unit/optim/test_ema.py tests/distributed/test_ema.py",
    ),
    Mutation(
        "weights without decay have decay",
        "optim/groups.py",
        "weight_decay = 0.0 if is_exempt else",
        "weight_decay = 0.0 if not is_exempt else",
        "tests/unit/optim",
    ),
    Mutation(
        "a non-finite gradient updates the weights",
        "resilience/nonfinite.py",
        "skip = torch.maximum(is_nonfinite, paused)",
        "skip = paused",
        "tests/unit/resilience/test_nonfinite.py",
    ),
    Mutation(
        "the digest of the data forgets its upper half",
        "resilience/agreement.py",
        "(self.digest_low + (self.digest_high << 32))",
        "(self.digest_low)",
        "tests/unit/resilience",
    ),
    Mutation(
        "Ctrl-C ends with the code of a preemption",
        "resilience/agreement.py",
        "Request.INTERRUPT if signum == signal.SIGINT",
        "Request.TERMINATE if signum == signal.SIGINT",
        "tests/unit/resilience tests/unit/test_run.py tests/unit/test_process_start.py",
    ),
    Mutation(
        "FSDP halves the gradients",
        "distributed/data_parallel.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        "tests/distributed/test_parity.py",
    ),
    Mutation(
        "gradients of norms miss the other ranks of tensor parallelism",
        "distributed/tensor_parallel.py",
        '"norm": Rule(shard_dim=None, partial_gradient="sequence parallel")',
        '"norm": Rule(shard_dim=None, partial_gradient="never")',
        "tests/distributed/test_parity.py tests/distributed/test_tensor.py",
    ),
    Mutation(
        "context parallelism gathers chunks in the order of ranks",
        "distributed/context_parallel.py",
        "return torch.cat([chunks[number] for number in sorted(chunks)], SEQUENCE)",
        "return torch.cat([chunks[number] for number in chunks], SEQUENCE)",
        "tests/distributed/test_context.py",
    ),
    Mutation(
        "pipeline stages sum losses of tokens",
        "distributed/pipeline.py",
        "share = loss / self._num_valid",
        "share = loss / 1",
        "tests/distributed/test_pipeline.py",
    ),
    Mutation(
        "rows of experts return in the wrong order",
        "distributed/row_exchange.py",
        "_permute(computed, position, source)",
        "_permute(computed, source, position)",
        "tests/distributed/test_expert_parallel.py",
    ),
    Mutation(
        "initial weights depend on the shards",
        "distributed/initialize.py",
        "column_states = columns * SIGNED_GAMMA",
        "column_states = (columns - columns[:1]) * SIGNED_GAMMA",
        "tests/distributed/test_parity.py tests/distributed/test_tensor.py",
    ),
    Mutation(
        "a misspelled key is accepted",
        "config/base.py",
        'frozen=True, extra="forbid"',
        'frozen=True, extra="ignore"',
        "tests/unit/config",
    ),
    Mutation(
        "a damaged extent is read without an error",
        "checkpoint/verification.py",
        "if digest.hexdigest() != self.record.extents[index]:",
        "if len(digest.hexdigest()) != len(self.record.extents[index]):",
        "tests/faults/test_damage.py",
    ),
    Mutation(
        "retention ignores a newest step that was damaged since",
        "checkpoint/step_folders.py",
        "if not self._is_full(*expiry.newest_full):",
        "if self._is_full(*expiry.newest_full):",
        "tests/unit/checkpoint/test_retention.py",
    ),
    Mutation(
        "every epoch has the same order",
        "data/samples/order.py",
        "mix64(mix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch))",
        "mix64(mix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(0))",
        "tests/unit/data/test_order.py",
    ),
    Mutation(
        "positions do not restart at documents",
        "data/samples/packing.py",
        "starts[row, column] = column\n",
        "starts[row, column] = 0\n",
        "tests/unit/data/test_batches.py tests/unit/data/test_pipeline.py",
    ),
    Mutation(
        "rows of metrics beyond the loaded step stay",
        "util/jsonl.py",
        "kept.writelines(compress(lines, map(not_, is_moved)))",
        "kept.writelines(lines)",
        "tests/unit/util/test_jsonl.py tests/unit/monitor",
    ),
    Mutation(
        "the first labels of documents are trained although masked",
        "data/samples/packing.py",
        "is_label = samples[row] >= 0",
        "is_label = samples[row] < 0",
        "tests/unit/data/test_batches.py tests/unit/data/test_pipeline.py",
    ),
)


def copy_repository(folder: Path) -> None:
    """Copy the files that git knows, with uncommitted changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def run_daily_tests(folder: Path, words: str) -> int:
    """Run a part of the daily tests of a copy. Returns pytest's code: 0 passed, 1 failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *words.split()]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


def main(names: list[str]) -> int:
    """Run the mutations of these names, or all. Returns 1 if a mutation was not detected."""
    undetected = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        folder.mkdir()
        copy_repository(folder)
        chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
        for words in sorted({mutation.tests for mutation in chosen}):
            code = run_daily_tests(folder, words)
            if code:
                print(f"{words} ends with {code} without a mutation", flush=True)
                return 1
        for number, mutation in enumerate(chosen, 1):
            started = time.monotonic()
            path = folder / "torchtitan_like" / mutation.file
            text = path.read_text()
            path.write_text(text.replace(mutation.before, mutation.after))
            is_detected = run_daily_tests(folder, mutation.tests) == 1
            path.write_text(text)
            undetected += [] if is_detected else [mutation.name]
            answer = "red" if is_detected else "NOT DETECTED"
            seconds = time.monotonic() - started
            print(f"{number}/{len(chosen)} {mutation.name}: {answer}, {seconds:.0f} s", flush=True)
    return 1 if undetected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
