"""Runs resume correctly after kills. `./run_tests.sh --faults` performs many more kills."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kills import (
    SAVE_POINTS,
    START_POINTS,
    Chain,
    Kill,
    make_reference,
    named_kills,
    random_kill,
)
from tests.faults.shim import Faults
from tests.faults.trainer import Starter
from torchtitan_like.util.jsonl import read_rows

ALL = (0, 1)
# One kill at each point, with alternating halted and killed ranks, so that every pair occurs.
NAMED = [kill for number, kill in enumerate(named_kills()) if number % 3 == (number // 3) % 3]


def run_kills(chain: Chain, kills: list[Kill]) -> int:
    """Start and kill the run repeatedly, then let it finish; return the number of kills.

    If a run ends before a kill, the next one starts in a new folder.
    """
    num_kills = 0
    for kill in kills:
        if not chain.run_and_kill(kill):
            chain.reset()
            continue
        num_kills += 1
    chain.finish()
    return num_kills


def test_run_resumes_after_a_kill_at_every_named_point(chain: Chain) -> None:
    assert {kill.point for kill in NAMED} == set(SAVE_POINTS)
    # A run may end before the last kill.
    assert run_kills(chain, NAMED) >= len(NAMED) - 1


def test_run_resumes_after_kills_during_async_checkpoints(chain: Chain) -> None:
    chain.overrides["checkpoint__async_mode"] = "async"
    kills = [
        Kill("in the middle of a shard", ALL, 1),
        Kill("before the manifest", (1,)),
        Kill("before the step is published", ALL),
        Kill("after the step is published", (0,)),
    ]
    assert run_kills(chain, kills) == len(kills)


@pytest.mark.nightly
def test_run_resumes_after_kills_during_exports(chain: Chain) -> None:
    chain.overrides.update(checkpoint__hf_interval=1, checkpoint__hf_shard_gb=2e-5)
    kills = [
        Kill("in the middle of an export's weights", (1,)),
        Kill("before an export is published", ALL),
    ]
    assert run_kills(chain, kills) == len(kills)


def test_next_start_writes_an_export_lost_to_a_kill(chain: Chain) -> None:
    """This also applies to the last step, after which no training remains."""
    chain.overrides.update(checkpoint__interval=2, checkpoint__hf_interval=2, training__steps=6)
    exports, point = chain.folder / "checkpoint/hf", "before an export is published"
    assert chain.run_and_kill(Kill(point, ALL))
    assert chain.newest == 2 and not (exports / "step-2").exists()
    assert chain.run_and_kill(Kill(point, ALL, steps_ahead=4))
    assert chain.newest == 6 and {path.name[:6] for path in exports.iterdir()} == {
        "step-2",
        "step-4",
        "step-6",
    }
    assert not (exports / "step-6").exists() and (chain.folder / "checkpoint/run.lock").exists()
    run = chain.run(description="a start with nothing to do")
    assert run.has_output("Nothing to do: step 6 of 6") and run.exit == {
        "reason": "done",
        "code": 0,
        "step": 6,
    }
    assert sorted(path.name for path in exports.iterdir()) == ["step-2", "step-4", "step-6"]
    names = {path.name for path in (chain.folder / "checkpoint").iterdir()}
    assert names == {"hf", "step-2", "step-4", "step-6"}
    uninterrupted = replace(chain, folder=chain.folder.with_name("uninterrupted"))
    uninterrupted.run()
    for export in exports.iterdir():
        other = uninterrupted.folder / "checkpoint/hf" / export.name
        names = {path.name for path in other.iterdir()}
        assert names == {path.name for path in export.iterdir()}
        for name in names - {"config.toml", "manifest.json"}:  # these contain the path of the run
            assert (export / name).read_bytes() == (other / name).read_bytes(), (export, name)
        manifests = [json.loads((path / "manifest.json").read_text()) for path in (export, other)]
        # metrics_bytes depends on timings in the metrics.
        ignored = {"config", "files", "self", "metrics_bytes"}
        contents = [{k: v for k, v in m.items() if k not in ignored} for m in manifests]
        assert contents[0] == contents[1]


def test_run_resumes_after_kills_during_cleanup(chain: Chain) -> None:
    kills = []
    for number, point in enumerate(START_POINTS):
        # After this kill the next start would wait half a minute for the lock's owner.
        if point != "while the lock is acquired":
            kills += [
                Kill("in the middle of a shard", ALL, 1),
                Kill(point, (0,) if number % 2 else ALL),
            ]
    assert run_kills(chain, kills) == len(kills)


@pytest.mark.nightly
def test_run_resumes_after_kills_at_random_times(chain: Chain) -> None:
    draw = random.Random(1)
    run_kills(chain, [random_kill(draw, life_seconds=2.0, save_seconds=0.2) for _ in range(8)])


@pytest.mark.nightly
def test_run_resumes_after_kills_under_torchrun(torchrun_chain: Chain) -> None:
    kills = [Kill("in the middle of a shard", (1,), 1), Kill("before the step is published", ALL)]
    assert run_kills(torchrun_chain, kills) == len(kills)


EXPERTS = {
    "model__name": "qwen3",
    "model__flavor": "debugmodel_moe",
    "model__args__multiple_of": None,  # of Llama 3
    "model__args__n_kv_heads": 2,
    "model__args__head_dim": 8,
    "model__args__num_experts": 4,
    "model__args__top_k": 2,
    "model__args__moe_inter_dim": 16,
    "model__args__load_balance": "bias",
    "model__args__load_balance_coeff": 0.01,
    "parallelism__expert_parallel_degree": 2,
}


@pytest.mark.nightly
def test_run_with_experts_and_biases_resumes_after_kills(
    fork_server: Starter, faults: Faults, tmp_path: Path
) -> None:
    chain = make_reference(fork_server, faults, tmp_path, **EXPERTS)
    kills = [
        Kill("in the middle of a shard", ALL, 1),
        Kill("before the manifest", (1,)),
        Kill("before the step is published", (0,)),
        Kill("after the step is published", ALL),
    ]
    assert run_kills(chain, kills) == len(kills)
    reference = tmp_path / "reference/outputs"
    loads = [
        [row["moe"] for row in read_rows(folder / "metrics.jsonl")]
        for folder in (chain.folder, reference)
    ]
    assert loads[0] == loads[1] and loads[0][-1]["bias_range"] > 0
