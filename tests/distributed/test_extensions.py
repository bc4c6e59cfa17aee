"""Extensions of user code equal one rank on several ranks, and resume on other numbers of ranks."""

import functools

import pytest
import torch

from tests.distributed import parity
from tests.distributed.parity import compare, options
from tests.distributed.test_saving import SAVING, metric_rows
from tests.distributed.test_saving import train as train_to_the_end
from tests.harness.extensions import forgotten
from tests.harness.rank_pool import run_ranks
from torchtitan_like.checkpoint.errors import ChangedError
from torchtitan_like.util.exit_codes import ExitCode

MODULE = "tests.distributed.own_extensions"
OWN = {
    "experimental.custom_import": MODULE,
    "optimizer.name": f"{MODULE}:Lars",
    "loss.name": f"{MODULE}:with_z",
}
TP = "parallelism.tensor_parallel_degree"
LAYOUTS = {
    "fsdp": {"training.local_batch_size": 4},
    "tp": {TP: 2},
}
SOURCES = {
    "data.sources.map.path": "n",
    "data.sources.map.format": f"{MODULE}:Map",
    "data.sources.map.processor": f"{MODULE}:answers",
    "data.sources.stream.path": "m",
    "data.sources.stream.format": f"{MODULE}:Iterable",
    "data.sources.stream.text_field": "answer",
    "data.sources.stream.streaming": "true",
}


def run_cell(argv):
    with forgotten(MODULE):
        return parity.run_cell(argv)


def train(argv):
    with forgotten(MODULE):
        return train_to_the_end(argv)


@functools.cache
def one_rank(folder):
    return run_ranks(run_cell, 1, options(folder, "float64", **OWN))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_and_a_loss_equal_one_rank(tmp_path_factory, layout):
    folder = tmp_path_factory.getbasetemp() / "extensions"
    folder.mkdir(exist_ok=True)
    expected = one_rank(str(folder / "one-rank"))
    argv = options(str(folder / layout), "float64", **OWN | LAYOUTS[layout])
    compare(expected, run_ranks(run_cell, 2, argv)[0], "float64")


def save(folder, ranks, **changes):
    changes = {**SAVING, **OWN, **SOURCES, "lr_scheduler.total_steps": 6, **changes}
    codes = run_ranks(train, ranks, options(str(folder), "float32", **changes))
    assert codes == [ExitCode.DONE] * ranks


def test_a_source_resumes_on_another_number_of_ranks(tmp_path):
    """The digests are of all tokens that the ranks have read."""
    rows = {}
    for name, runs in {"straight": [(1, 6)], "moved": [(2, 2), (1, 4), (2, 6)]}.items():
        for ranks, steps in runs:
            changes = {"training.local_batch_size": 8 // ranks, "training.steps": steps}
            save(tmp_path / name, ranks, **changes)
        rows[name] = metric_rows(tmp_path / name, ("step", "data_digest", "data_digest_chain"))
    assert len(rows["straight"]) == 6 and rows["moved"] == rows["straight"]
    losses = [metric_rows(tmp_path / name, ("loss",)) for name in rows]
    values = [[float.fromhex(loss) for (loss,) in one] for one in losses]
    assert values[0] == pytest.approx(values[1], rel=1e-5)  # sums in another order


def resume_without(argv):
    with forgotten(MODULE), pytest.raises(ChangedError) as error:
        train_to_the_end(argv)
    return str(error.value)


def test_a_resumed_run_must_have_the_extensions(tmp_path):
    settings = {**SAVING, "lr_scheduler.total_steps": 2, "training.local_batch_size": 8}
    argv = options(str(tmp_path), "float32", **settings, **OWN, **{"training.steps": 1})
    assert run_ranks(train, 1, argv) == [ExitCode.DONE]
    argv = options(str(tmp_path), "float32", **settings, **{"training.steps": 2})
    (message,) = run_ranks(resume_without, 1, argv)
    for key in OWN:
        assert f'{key} "{OWN[key]}" -> ' in message


def masked_labels(argv):
    """Return the decoded labels of the first batch, and the decoded tokens that are no labels."""
    with forgotten(MODULE):
        trainer = parity.build(argv)
        try:
            batch = next(trainer.batches)
            folder = trainer.config.model.tokenizer_folder
        finally:
            parity.release(trainer)
    from torchtitan_like.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    tokens = torch.cat([batch.tokens[..., 1:], batch.labels[..., -1:].clamp(min=0)], -1)
    texts = []
    for is_label in (batch.labels != -100, batch.labels == -100):
        texts.append(tokenizer.decode(tokens[is_label].tolist()))
    return texts


def test_masked_parts_are_inputs_and_no_labels(tmp_path):
    sources = {key: value for key, value in SOURCES.items() if ".map." in key}
    argv = options(str(tmp_path / "run"), "float32", **OWN, **sources)
    (labels, others) = run_ranks(masked_labels, 1, argv)[0]
    assert "n" not in labels.replace("<|end_of_text|>", "") and ":" not in labels
    assert "n " in others and ": " in others
    assert any(character.isdigit() for character in labels)
