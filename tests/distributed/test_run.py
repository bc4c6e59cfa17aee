"""One run in its run directory: what it counts, when it validates, what it writes."""

import json

from tests.distributed.parity import options, short_documents
from tests.harness.rank_pool import run_ranks
from torchtitan_like.distributed.world import LaunchedAs
from torchtitan_like.launch import read_config
from torchtitan_like.monitor.jsonl import read_rows
from torchtitan_like.resilience.exit_codes import ExitCode
from torchtitan_like.resilience.requests import Requests
from torchtitan_like.train import main, run


def run_one_rank(argv):
    return run(read_config(argv, 1), LaunchedAs(0, 0, 1), Requests())


def test_validates_after_the_first_step_every_few_and_at_the_end(tmp_path):
    changes = {"training.steps": 5, "validation.enable": "true", "validation.freq": 3, "validation.steps": 1,
               "validation.seq_len": 32, "validation.dataset": "shakespeare_validation"}  # fmt: skip
    assert run_ranks(run_one_rank, 1, options(str(tmp_path / "run"), "float32", **changes)) == [ExitCode.DONE]
    assert [row["step"] for row in read_rows(tmp_path / "run/validation.jsonl")] == [1, 3, 5]


def test_what_only_fills_the_last_batch_is_not_counted(tmp_path):
    """An epoch that is no multiple of the batch."""
    text = tmp_path / "one.jsonl"
    text.write_text("".join(short_documents(tmp_path).read_text().splitlines(keepends=True)[:30]))
    changes = {"data.sources.one.path": text, "data.sources.one.max_epochs": 1, "training.steps": 100,
               "data.mask_document_starts": "false"}  # fmt: skip
    assert run_ranks(run_one_rank, 1, options(str(tmp_path / "run"), "float32", **changes)) == [ExitCode.DONE]
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    seen = [row["n_tokens_seen"] for row in rows]
    assert seen[:-1] == [8 * 32 * row["step"] for row in rows[:-1]]
    assert 0 < seen[-1] - seen[-2] < 8 * 32
    assert seen[-1] % 32 == 0 and seen[-1] - 32 < sum(row["num_valid_tokens"] for row in rows) <= seen[-1]


def test_the_resolved_config_is_saved_where_asked(tmp_path):
    argv = options(str(tmp_path / "run"), "float32", **{"job.save_config_file": "saved/config.json"})
    assert run_ranks(main, 1, [*argv, "--training.steps", "1"]) == [0]
    assert json.loads((tmp_path / "run/saved/config.json").read_text())["training"]["steps"] == 1
