"""Data sources and sample processors of user code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.extensions import forgotten
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.formats import NoDocument
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.data.text.user_documents import UserDocuments, UserProcessor

RECORDS = [
    {"question": f"what is {i} ", "answer": "one " * (i % 7) + f"{i} said"} for i in range(60)
]


def answers(record: Mapping[str, Any], settings: Mapping[str, Any]) -> list[tuple[str, bool]]:
    return [(record["question"], False), (record["answer"], True)]


def write_jsonl(folder: Path) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def write_parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    path = folder / "records.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_each_trained_token_is_a_label_once(
    build: Callable[..., TrainBatches],
    tokenizer: Tokenizer,
    tmp_path: Path,
    write: Callable[[Path], Path],
    packing: str,
    streaming: bool,
) -> None:
    batches = build(
        write(tmp_path),
        data={"packing": packing},
        max_epochs=1,
        streaming=streaming,
        processor=f"{__name__}:answers",
    )
    labels: Counter[int] = Counter()
    num_valid = 0
    for batch in batches:
        assert int(batch.tokens.max()) < tokenizer.vocab_size
        labels.update(batch.labels[batch.labels != -100].tolist())
        num_valid += batch.num_valid_tokens
    texts = [record["answer"] for record in RECORDS]
    expected = Counter(token for text in texts for token in tokenizer.encode(text))
    assert tokenizer.eos_id is not None
    expected[tokenizer.eos_id] += len(texts)  # EOS follows an answer
    assert labels == expected and num_valid == labels.total()


def number(record: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    return 3


def test_another_result_of_a_processor_is_refused() -> None:
    with pytest.raises(NoDocument, match="returned 3, expected text or pairs"):
        UserProcessor(f"{__name__}:number", {})({"text": ""})


def test_the_identity_of_a_processor_changes_with_the_file_that_defines_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token cache belongs to the identity. The name may be of another file."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("from own_package.code import answers")
    identities = []
    for text in ("", "", "text"):
        (package / "code.py").write_text(f"def answers(record, settings): return {text!r}")
        with forgotten("own_package", "own_package.code"):
            identities.append(UserProcessor("own_package:answers", {}).identity)
    assert identities[0] == identities[1] != identities[2]


class Lines:
    fingerprint = "lines"

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[str]:
        for index in range(8):
            self.num_read += 1
            yield f"line {index}"


def test_an_iterable_is_read_on_from_where_it_was_left() -> None:
    documents = UserDocuments(f"{__name__}:Lines", "", {})
    assert list(documents.read(0, 3)) == ["line 0", "line 1", "line 2"]
    assert list(documents.read(3, 5)) == ["line 3", "line 4"]
    assert documents._source.num_read == 5
    assert list(documents.read(4, 6)) == ["line 4", "line 5"]  # from the start again
    assert documents._source.num_read == 11
    with pytest.raises(DataError, match=r"ends after 8 documents. Expected 10, its __len__"):
        list(documents.read(6, 10))
