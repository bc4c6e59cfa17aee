"""`titan run replay`: one process reproduces a non-finite step from the run's bundle."""

import math

import pytest
import torch

from tests.distributed.parity import ROOT, build, options, release
from tests.harness.examples import example_words
from tests.harness.rank_pool import run_ranks
from torchtitan_like import train
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.cli import main as titan
from torchtitan_like.data.batches.batch import Batch
from torchtitan_like.monitor import log
from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode
from torchtitan_like.util.jsonl import decode, read_rows

BAD_STEP = 5
SPIKE_STEP = 10
SEQ_LEN = 32
# More text than the steps read, so that no sample repeats.
CORPUS = ROOT / "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
LONG_TEXT = {"training.dataset_path": CORPUS}
STEPS = {"training.steps": 9, "checkpoint.enable": "true", "checkpoint.keep_latest_k": 2}


def rare_token(trainer) -> int | None:
    """Return a token that only the last data rank reads, and not before BAD_STEP."""
    earlier_tokens: set[int] = set()
    position = trainer.batches.position
    for _ in range(BAD_STEP):
        batch: Batch = next(trainer.batches)
        tokens_by_rank = [
            set(tokens)
            for tokens in trainer.world.step_group.gather_objects(batch.tokens.unique().tolist())
        ]
        candidates = tokens_by_rank[-1].difference(
            earlier_tokens,
            *(tokens for tokens in tokens_by_rank[:-1] if tokens != tokens_by_rank[-1]),
        )
        earlier_tokens.update(*tokens_by_rank)
    trainer.batches._go_to(position)
    return min(candidates, default=None)


def train_with_inf_embedding(argv):
    """Train with an inf in the embedding of a rare token; return code, step and skipped steps."""
    trainer = build(argv)
    token = rare_token(trainer)
    assert token is not None
    weight = trainer.parts[0].tok_embeddings.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    owner, row = divmod(token, len(local))  # FSDP and tensor parallelism both shard dim 0 evenly
    if len(local) == len(weight) or owner == trainer.world.rank:
        with torch.no_grad():
            local[row, 3] = torch.inf
    rows = []
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    skipped = [row["step"] for row in rows if row["skipped"]]
    release(trainer)
    return code, trainer.progress.step, skipped


LAYOUTS = {
    "fsdp": {"training.local_batch_size": 4},
    "ddp, accumulation": {
        "training.local_batch_size": 2,
        "parallelism.data_parallel_replicate_degree": 2,
    },
    "tp": {"parallelism.tensor_parallel_degree": 2},
}
HAS_FINITE_LOSS = {"fsdp": [True, False], "ddp, accumulation": [True, False], "tp": [False]}


def token_pairs(labels):
    """Return all pairs of neighboring labels, shape (pairs, 2)."""
    rows = labels.reshape(-1, SEQ_LEN)
    return torch.stack([rows[:, :-1].flatten(), rows[:, 1:].flatten()], dim=1)


def scale_loss_on(head, pair, factor):
    """Multiply the loss of every micro-batch that contains `pair`."""
    plain = head.loss

    def loss(hidden, weight, labels):
        is_hit = (token_pairs(labels) == torch.tensor(pair)).all(1).any()
        return plain(hidden, weight, labels) * torch.where(is_hit, factor, 1.0)

    head.loss = loss


def train_with_large_loss_on_pair(argv, factor=math.inf, bad_step=BAD_STEP):
    """Train with a large loss on a token pair that only `bad_step` contains.

    Return exit code, last step, skipped steps and the pair.
    """
    trainer = build(argv)
    position = trainer.batches.position
    steps = []
    for _ in range(trainer.config.training.steps):
        local_pairs = set(map(tuple, token_pairs(next(trainer.batches).labels).tolist()))
        steps.append(set().union(*trainer.world.step_group.gather_objects(local_pairs)))
    trainer.batches._go_to(position)
    pairs_of_bad_step = steps.pop(bad_step - 1)
    pair = min(pair for pair in pairs_of_bad_step.difference(*steps) if -100 not in pair)
    scale_loss_on(trainer.parts[0].output, pair, factor)
    rows = []
    trainer.metrics.observers.append(rows.extend)
    code = trainer.train()
    skipped = [row["step"] for row in rows if row["skipped"]]
    release(trainer)
    return code, trainer.progress.step, skipped, pair


@pytest.fixture
def large_loss_in_replay(monkeypatch):
    """Return a function that patches the replay with the run's large loss on a token pair."""

    def patch(pair, factor=math.inf):
        build_model = train.build_model

        def build_and_patch(*args, **kwargs):
            model = build_model(*args, **kwargs)
            scale_loss_on(model.parts[0].output, pair, factor)
            return model

        monkeypatch.setattr(train, "build_model", build_and_patch)

    return patch


def train_with_spike(argv):
    return train_with_large_loss_on_pair(argv, 1000.0, SPIKE_STEP)


def train_with_fault_on_last_rank(argv, target):
    """Train while the last rank corrupts its loss or a reduced gradient in BAD_STEP."""
    trainer = build(argv)
    head, optimizer = trainer.parts[0].output, trainer.optim.optimizer
    plain, clip = head.loss, optimizer.clip_gradients

    def is_hit(kind):
        is_last = trainer.world.rank == trainer.world.size - 1
        return is_last and kind == target and trainer.progress.step + 1 == BAD_STEP

    def loss(*args):
        return plain(*args) * (torch.inf if is_hit("loss") else 1.0)

    def corrupt_and_clip(max_norm):
        if is_hit("gradient"):
            optimizer.named[0][1].grad.to_local().fill_(torch.nan)
        return clip(max_norm)

    head.loss, optimizer.clip_gradients = loss, corrupt_and_clip
    code = trainer.train()
    release(trainer)
    return code, trainer.progress.step


def train_with_infinite_loss(argv):
    return train_with_fault_on_last_rank(argv, "loss")


def train_with_nan_gradient(argv):
    return train_with_fault_on_last_rank(argv, "gradient")


def run(tmp_path, layout, train=train_with_inf_embedding, **overrides):
    argv = options(str(tmp_path / "run"), "float32", **LAYOUTS[layout], **{**STEPS, **overrides})
    return run_ranks(train, 2, argv)


def read_bundle(tmp_path, step):
    path = tmp_path / f"run/attempts/1/bad-steps/step-{step}.json"
    return path, decode(path.read_bytes())


@pytest.fixture(autouse=True)
def keep_root_logger(monkeypatch):
    """Keep the process-wide logger, which other tests use."""
    monkeypatch.setattr(log, "init_logger", lambda: None)


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def replay(tmp_path, path, *settings):
    """Replay a bundle and return exit code and result. Check that the run folder is unchanged."""
    before = modification_times(tmp_path / "run")
    code = titan(["run", "replay", str(path), "--out", str(tmp_path / "result.json"), *settings])
    assert modification_times(tmp_path / "run") == before
    return code, decode((tmp_path / "result.json").read_bytes())


def assert_embedding_is_reported(result, bundle):
    assert result["data_digest"] == bundle["data_digest"]
    assert "the first inf or nan is in tok_embeddings (Embedding), weight" in result["first_module"]
    assert result["bad_values"] == ["tok_embeddings.weight"]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name == "fsdp" else pytest.mark.nightly) for name in LAYOUTS],
)
def test_stopped_run_pins_its_checkpoint_and_is_reproduced(tmp_path, layout, capsys, monkeypatch):
    endings = run(tmp_path, layout)
    assert [ending[:2] for ending in endings] == [(ExitCode.BAD_NUMBERS, BAD_STEP - 1)] * 2
    path, bundle = read_bundle(tmp_path, BAD_STEP)
    assert published_steps(tmp_path / "run/checkpoint") == [], (
        "weights with an inf must not be published"
    )
    saved = "checkpoint/step-4.nonfinite"
    pinned = {"kind": "resume", "path": saved, "is_start": False, "is_pinned": True}
    assert bundle["checkpoint"] == pinned
    assert (bundle["position"], bundle["samples"], bundle["seed"]) == (32, [[32, 39]], 42)
    rows = {row["step"]: row for row in read_rows(tmp_path / "run/metrics.jsonl")}
    assert str({**bundle, **rows[BAD_STEP]}) == str(bundle), (
        "the bundle must contain the step's metrics"
    )
    assert [math.isfinite(loss) for loss in bundle["rank_losses"].values()] == HAS_FINITE_LOSS[
        layout
    ]
    code, result = replay(tmp_path, path)
    assert code == 0 and capsys.readouterr().out.endswith("\nreproduced\n")
    assert_embedding_is_reported(result, bundle)
    (tmp_path / "outputs").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert titan(example_words("run replay")) == 0


def test_skipped_step_is_replayed_from_an_older_checkpoint(tmp_path, large_loss_in_replay):
    """The replay retrains the steps in between. The run kept the checkpoint of the bundle."""
    skip = {
        "resilience.on_nonfinite": "skip",
        "checkpoint.interval": 3,
        "checkpoint.last_save_model_only": "false",
    }
    more = {"training.steps": 12, "checkpoint.async_mode": "async"}
    endings = run(tmp_path, "fsdp", train_with_large_loss_on_pair, **LONG_TEXT, **skip, **more)
    assert {ending[0] for ending in endings} == {ExitCode.DONE} and endings[0][2][0] == BAD_STEP
    path, bundle = read_bundle(tmp_path, BAD_STEP)
    assert bundle["checkpoint"]["path"] == "checkpoint/step-3"
    assert [step.step for step in published_steps(tmp_path / "run/checkpoint")] == [3, 9, 12]
    large_loss_in_replay(endings[0][3])
    code, result = replay(tmp_path, path)
    assert code == 0 and result["data_digest"] == bundle["data_digest"]
    assert not math.isfinite(result["loss"]) and result["bad_values"] == []


def test_run_without_final_checkpoint_is_replayed_from_an_older_one(tmp_path, large_loss_in_replay):
    """The run updated weights during backward. The replay still reports gradients."""
    early = {"optimizer.early_step_in_backward": "true", "checkpoint.interval": 2}
    endings = run(tmp_path, "fsdp", train_with_large_loss_on_pair, **LONG_TEXT, **early)
    assert endings[0][0] == ExitCode.BAD_NUMBERS
    path, bundle = read_bundle(tmp_path, BAD_STEP)
    assert (bundle["checkpoint"]["path"], bundle["checkpoint"]["is_pinned"]) == (
        "checkpoint/step-4",
        True,
    )
    large_loss_in_replay(endings[0][3])
    code, result = replay(tmp_path, path)
    assert code == 0 and len(result["bad_gradients"]) == result["num_parameters"]


def test_run_without_checkpoints_is_replayed_from_its_seed(tmp_path):
    """The initial weights are finite, so the replay reports different numbers."""
    run(tmp_path, "fsdp", **{"checkpoint.enable": "false", "checkpoint.keep_latest_k": 10})
    path, bundle = read_bundle(tmp_path, BAD_STEP)
    assert bundle["checkpoint"] == {
        "kind": "scratch",
        "path": None,
        "is_start": True,
        "is_pinned": False,
    }
    code, result = replay(tmp_path, path)
    assert code == 1
    assert result["data_digest"] == bundle["data_digest"] and math.isfinite(result["loss"])
    assert result["bad_values"] == [] and result["first_module"] is None


def test_spike_writes_a_bundle_and_is_replayed(tmp_path, large_loss_in_replay, capsys):
    settings = {
        "training.steps": 12,
        "resilience.spike_window": 8,
        "checkpoint.interval": 4,
        "checkpoint.last_save_model_only": "false",
    }
    endings = run(tmp_path, "fsdp", train_with_spike, **LONG_TEXT, **settings)
    assert [ending[:3] for ending in endings] == [(ExitCode.DONE, 12, [])] * 2
    path, bundle = read_bundle(tmp_path, SPIKE_STEP)
    assert bundle["spike"].keys() == {"loss", "grad_norm"}
    assert bundle["checkpoint"]["path"] == "checkpoint/step-8"
    events = [row["event"] for row in read_rows(tmp_path / "run/events.jsonl")]
    assert events.count("spike_bundle") == 1 and "bad_step" not in events
    assert all("position" not in row for row in read_rows(tmp_path / "run/metrics.jsonl"))

    code, result = replay(tmp_path, path)
    assert code == 1 and "below the spike's limit" in capsys.readouterr().out
    large_loss_in_replay(endings[0][3], 1000.0)
    code, result = replay(tmp_path, path)
    assert code == 0 and result["loss"] > bundle["spike"]["loss"]


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (train_with_infinite_loss, "in the run the loss of data rank 1 was not finite"),
        pytest.param(
            train_with_nan_gradient,
            "in the run the loss of every data rank was finite",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_replay_explains_why_a_fault_of_one_rank_is_not_reproduced(tmp_path, capsys, train, reason):
    endings = run(tmp_path, "fsdp", train)
    assert endings == [(ExitCode.BAD_NUMBERS, BAD_STEP - 1)] * 2
    path, bundle = read_bundle(tmp_path, BAD_STEP)
    assert bundle["checkpoint"]["path"] == "checkpoint/step-4"
    code, result = replay(tmp_path, path)
    out = capsys.readouterr().out
    assert code == 1 and result["bad_gradients"] == []
    assert f"why: {reason}" in out and "the replay started from checkpoint/step-4" in out
    assert out.endswith("\nNOT reproduced\n")


def test_missing_bundle_or_checkpoint_is_reported(tmp_path, capsys):
    assert titan(["run", "replay", str(tmp_path / "step-5.json")]) == WRONG_INPUT
    assert "step-5.json cannot be read" in capsys.readouterr().err
    run(tmp_path, "tp")
    path, _ = read_bundle(tmp_path, BAD_STEP)
    (tmp_path / "run/checkpoint/step-4.nonfinite").rename(tmp_path / "step-4")
    assert titan(["run", "replay", str(path)]) == WRONG_INPUT
    assert (
        "checkpoint/step-4.nonfinite, the checkpoint before the step, is missing"
        in capsys.readouterr().err
    )
