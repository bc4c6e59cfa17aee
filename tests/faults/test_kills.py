"""A run killed at any moment continues as if uninterrupted: a few of the kills of ./run_tests.sh --faults."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from tests.faults.kills import SAVE_POINTS, START_POINTS, Chain, Kill, named_kills, random_kill

ALL = (0, 1)
# One kill at each point. The halted rank and the killed ones alternate, so that every pair occurs.
NAMED = [kill for number, kill in enumerate(named_kills()) if number % 3 == (number // 3) % 3]


def live_through(chain: Chain, kills: list[Kill]) -> int:
    """Start and kill in turn, in new folders when a run is over; then let the last one finish. The number of kills."""
    done = 0
    for kill in kills:
        if not chain.live(kill):
            chain.begin_anew()
            continue
        done += 1
    chain.finish()
    return done


def test_killed_at_every_named_point(chain: Chain) -> None:
    assert {kill.point for kill in NAMED} == set(SAVE_POINTS)
    assert live_through(chain, NAMED) >= len(NAMED) - 1  # a run may be over before the last of them


def test_killed_at_named_points_in_the_background(chain: Chain) -> None:
    chain.overrides["checkpoint__async_mode"] = "async"
    kills = [Kill("in the middle of a shard", ALL, 1), Kill("before the manifest", (1,)),
             Kill("before the step has its name", ALL), Kill("after the step has its name", (0,))]  # fmt: skip
    assert live_through(chain, kills) == len(kills)


def test_killed_while_it_exports(chain: Chain) -> None:
    chain.overrides.update(checkpoint__hf_interval=1, checkpoint__hf_shard_gb=2e-5)
    kills = [Kill("in the middle of an export's weights", (1,)), Kill("before an export has its name", ALL)]
    assert live_through(chain, kills) == len(kills)


def test_an_export_lost_to_a_kill_is_made_by_the_next_start(chain: Chain) -> None:
    """In the middle of a run, and at its last step, where nothing is left to train."""
    chain.overrides.update(checkpoint__interval=2, checkpoint__hf_interval=2, training__steps=6)
    exports, lost = chain.folder / "checkpoint/hf", "before an export has its name"
    assert chain.live(Kill(lost, ALL))
    assert chain.newest == 2 and not (exports / "step-2").exists()
    assert chain.live(Kill(lost, ALL, steps_ahead=4))
    assert chain.newest == 6 and {path.name[:6] for path in exports.iterdir()} == {
        "step-2",
        "step-4",
        "step-6",
    }
    assert not (exports / "step-6").exists() and (chain.folder / "checkpoint/run.lock").exists()
    ended = chain.run(what="a start with nothing to do")
    assert ended.says("Nothing to do: step 6 of 6") and ended.exit == {
        "reason": "done",
        "code": 0,
        "step": 6,
    }
    assert sorted(path.name for path in exports.iterdir()) == ["step-2", "step-4", "step-6"]
    names = {path.name for path in (chain.folder / "checkpoint").iterdir()}
    assert names == {"hf", "step-2", "step-4", "step-6"}
    undisturbed = replace(chain, folder=chain.folder.with_name("undisturbed"))
    undisturbed.run()
    for export in exports.iterdir():
        other = undisturbed.folder / "checkpoint/hf" / export.name
        names = {path.name for path in other.iterdir()}
        assert names == {path.name for path in export.iterdir()}
        for name in names - {"config.toml", "manifest.json"}:  # these name the folder of the run
            assert (export / name).read_bytes() == (other / name).read_bytes(), (export, name)
        manifests = [json.loads((path / "manifest.json").read_text()) for path in (export, other)]
        ignored = {"config", "files", "self", "metrics_bytes"}  # the last depends on timings in rows
        kept = [{k: v for k, v in m.items() if k not in ignored} for m in manifests]
        assert kept[0] == kept[1]


def test_killed_while_cleaning_up_after_a_kill(chain: Chain) -> None:
    kills = []
    for number, point in enumerate(START_POINTS):
        if point != "while the lock is taken":  # the start after it waits half a minute for a sign of life
            kills += [Kill("in the middle of a shard", ALL, 1), Kill(point, (0,) if number % 2 else ALL)]
    assert live_through(chain, kills) == len(kills)


def test_killed_at_random_moments(chain: Chain) -> None:
    draw = random.Random(1)
    live_through(chain, [random_kill(draw, life_seconds=2.0, save_seconds=0.2) for _ in range(8)])


def test_killed_under_torchrun(torchrun_chain: Chain) -> None:
    kills = [Kill("in the middle of a shard", (1,), 1), Kill("before the step has its name", ALL)]
    assert live_through(torchrun_chain, kills) == len(kills)
