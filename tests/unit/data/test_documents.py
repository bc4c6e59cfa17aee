"""Every format yields the same texts for any piece size; errors name the file and line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.documents import Corpus, find_corpus, plan_pieces, read_piece
from torchtitan_like.data.text.formats import Span

from .conftest import TEXTS, write_jsonl


def read(path: Path | str, format_name: str = "auto", text_field: str = "text") -> list[str]:
    corpus = find_corpus(str(path), format_name, text_field)
    records = [record for piece in plan_pieces(corpus) for record in read_piece(corpus, piece)]
    assert all(isinstance(record.document, str) for record in records)
    return [record.document for record in records]  # type: ignore[misc]


def write_table(
    file: Path, texts: list[str | None], *, rows: int = 3, kind: str = "string"
) -> Path:
    """Write a table with the column "text" of ``kind``, in chunks of ``rows``.

    The name selects parquet (".parquet"), Arrow file ("file...") or Arrow stream.
    """
    import pyarrow
    import pyarrow.parquet

    columns = {
        "string": pyarrow.array(texts, pyarrow.string()),
        "null": pyarrow.nulls(len(texts)),
        "large": pyarrow.array(texts, pyarrow.large_string()),
        "dictionary": pyarrow.array(texts, pyarrow.string()).dictionary_encode(),
        "int": pyarrow.array(range(len(texts))),
    }
    table = pyarrow.table({"id": list(range(len(texts))), "text": columns[kind]})
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file, row_group_size=rows)
        return file
    new_writer = pyarrow.ipc.new_file if file.name.startswith("file") else pyarrow.ipc.new_stream
    with new_writer(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file


@pytest.fixture(params=[1, 100, documents.PIECE_BYTES])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(documents, "PIECE_BYTES", request.param)
    monkeypatch.setattr(documents, "BLOCK_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "stream.arrow", "file.arrow"])
def test_pieces_of_every_format_yield_the_texts_in_order(
    tmp_path: Path, name: str, piece_bytes: int
) -> None:
    file = tmp_path / name
    write_jsonl(file, TEXTS) if "json" in name else write_table(file, TEXTS)
    assert read(file) == TEXTS


@pytest.mark.parametrize("kind", ["large", "dictionary"])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_all_kinds_of_string_columns_are_read(tmp_path: Path, name: str, kind: str) -> None:
    assert read(write_table(tmp_path / name, TEXTS, kind=kind)) == TEXTS


def test_a_saved_hugging_face_dataset_is_read_from_its_folder(tmp_path: Path) -> None:
    # In a separate process: the library is slow to import, and reading must not need it.
    script = (
        "import sys, json, datasets; d = datasets.Dataset.from_dict({'text': json.loads(sys.argv[2])});"
        "d.save_to_disk(sys.argv[1] + '/one', num_shards=3);"  # its files remain after the next save
        "d.select(range(1, len(d))).save_to_disk(sys.argv[1] + '/one', num_shards=2);"
        "datasets.DatasetDict({'train': d, 'test': d}).save_to_disk(sys.argv[1] + '/splits');"
        # The library may write a cache with the same rows into the folder.
        "datasets.load_from_disk(sys.argv[1] + '/one').map(lambda row: {'size': len(row['text'])})"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), json.dumps(TEXTS)],
        check=True,
        capture_output=True,
    )
    prefixes = sorted(file.name[:6] for file in (tmp_path / "one").glob("*.arrow"))
    assert prefixes == ["cache-"] + ["data-0"] * 5
    assert read(tmp_path / "one") == read(tmp_path / "one" / "*.arrow") == TEXTS[1:]
    assert read(tmp_path / "splits" / "train") == TEXTS
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        read(tmp_path / "splits")
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        DataError, match=r"one lacks data-00001-of-00002.arrow, which its state.json lists"
    ):
        read(tmp_path / "one")


def test_a_text_file_of_any_size_is_one_document(tmp_path: Path, piece_bytes: int) -> None:
    (tmp_path / "b.txt").write_bytes("zwei\r\nZeilen ü\n".encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone" + b" more" * 100)
    (tmp_path / "c.txt").write_bytes(b"")
    assert read(tmp_path) == ["one" + " more" * 100, "zwei\r\nZeilen ü\n"]


@given(
    st.lists(st.text(alphabet='aé\n🙂\\"', max_size=30), max_size=12),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_lines_are_read_once_wherever_pieces_end(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    step: int,
    ascii_only: bool,
    last_newline: bool,
) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_bytes("\n\r\n".join(lines).encode() + b"\n" * last_newline)
    size = file.stat().st_size
    corpus = Corpus(file.parent, (file,), "jsonl", "text")
    spans = [
        Span(str(file), start, min(start + step, size), step) for start in range(0, size, step)
    ]
    assert [record.document for span in spans for record in read_piece(corpus, (span,))] == texts


def test_small_files_share_a_piece_and_large_ones_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 1000)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 500)
    for number in range(50):
        write_jsonl(tmp_path / f"{number:02}.jsonl", ["x" * 70])
    write_jsonl(tmp_path / "99.jsonl", ["y" * 970] * 5)
    pieces = plan_pieces(find_corpus(str(tmp_path)))
    assert 10 <= len(pieces) <= 14
    assert max(map(documents.piece_size, pieces)) <= 1000


def test_paths_expand_to_files_sorted_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        "b/2.jsonl",
        "a.jsonl",
        "b/10.jsonl",
        ".hidden.jsonl",
        "token_cache/x.jsonl",
        ".token_cache/x.jsonl",
        "b/readme.md",
        ".git/y.jsonl",
    ]:
        write_jsonl(tmp_path / name, [name])
    folder = ["a.jsonl", "b/10.jsonl", "b/2.jsonl"]
    assert read(tmp_path) == folder
    assert read(tmp_path / "b" / "*.jsonl") == folder[1:]
    assert read(tmp_path / "**" / "1*.jsonl") == ["b/10.jsonl"]
    assert read(tmp_path / "**" / "[ab0-9]*.jsonl") == folder == read(tmp_path / "**" / "*.jsonl")
    for cache in ("token_cache", ".token_cache"):
        assert read(tmp_path / cache / "*.jsonl") == [f"{cache}/x.jsonl"]
    assert read(tmp_path / "b" / "readme.md", "jsonl") == ["b/readme.md"]
    monkeypatch.chdir(tmp_path)
    assert read("b/2.jsonl") == ["b/2.jsonl"]
    (tmp_path / "links").mkdir()
    for name, target in (("elsewhere", "../b"), ("once-more", "../b"), ("in-a-circle", "../links")):
        (tmp_path / "links" / name).symlink_to(target)
    assert read("links") == folder[1:]


def read_error(path: Path | str, **kwargs: str) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **kwargs)
    return str(caught.value)


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    """Links into the Hub's cache break when a cluster deletes old files."""
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "blob")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        assert "b.jsonl is a broken link" in read_error(path)


def test_missing_data_is_reported(tmp_path: Path) -> None:
    assert f"no data at '{tmp_path}/none.jsonl': it is not a file" in read_error(
        tmp_path / "none.jsonl"
    )
    assert "matching glob" in read_error(tmp_path / "*.jsonl")
    assert "a folder without files of a known ending" in read_error(tmp_path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text")
    assert "unknown format of" in read_error(tmp_path / "a.csv")
    write_jsonl(tmp_path / "b.jsonl", ["b"])
    (tmp_path / "c.txt").write_text("c")
    message = read_error(tmp_path)
    assert "files of several formats" in message and "b.jsonl" in message and "c.txt" in message
    assert read(tmp_path, "text") == ["c"]


GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "malformed": (b'{"text": "x"\n', "malformed JSON"),
    "truncated": (b'{"text": "abc', "malformed JSON"),
    "a list": (b'["x"]\n', "it is a JSON list"),
    "no field": (b'{"body": "x", "id": 3}\n', "no field \"text\" among 'body', 'id'"),
    "null": (b'{"text": null}\n', '"text" is null'),
    "number": (b'{"text": 5}\n', '"text" is 5'),
    "not UTF-8": (b'{"text": "caf\xe9 x"}\n', "is not UTF-8"),
    "truncated UTF-8": (b'{"text": "\xe2\x82"}\n', "is not UTF-8"),
    "half a surrogate pair": (b'{"text": "x\\ud83d"}\n', "half of a surrogate pair at character 2"),
    "NUL bytes": (b"\0\0\0\0\n", "malformed JSON"),
    "endless number": (b'{"id": ' + b"9" * 5000 + b"}\n", "JSON that cannot be read"),
}


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("num_before", [0, 3])
def test_errors_name_the_file_and_line_of_a_bad_record(
    tmp_path: Path, case: str, num_before: int, piece_bytes: int
) -> None:
    line, message = BAD_LINES[case]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(GOOD * num_before + b"\n" + line)
    error = read_error(file)
    assert error.startswith(f"{file}, line {num_before + 2}: ") and message in error


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_skipped_on_request(tmp_path: Path, case: str, piece_bytes: int) -> None:
    line, message = BAD_LINES[case]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(GOOD + b"\n" + line.rstrip(b"\n") + b"\n" + GOOD * 2)
    good, bad = read_skipping(file)
    assert good == ["good"] * 3
    assert (
        len(bad) == 1 and bad[0].startswith(f"{file}, byte {len(GOOD) + 1}: ") and message in bad[0]
    )


def read_skipping(path: Path) -> tuple[list[str], list[str]]:
    """Return the texts, and the messages about bad records."""
    corpus = find_corpus(str(path), on_bad_record="skip")
    records = [record for piece in plan_pieces(corpus) for record in read_piece(corpus, piece)]
    texts = [record.document for record in records if isinstance(record.document, str)]
    return texts, [str(record) for record in records if record.document is None]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("kind", ["string", "large", "dictionary"])
def test_bad_rows_are_reported_or_skipped(tmp_path: Path, name: str, kind: str) -> None:
    file = write_table(tmp_path / name, ["a", "QQQQ", None, "d", "e"], rows=2, kind=kind)
    file.write_bytes(file.read_bytes().replace(b"QQQQ", b"Q\xffQQ"))
    good, bad = read_skipping(file)
    assert good == ["a", "d", "e"]
    assert bad == [
        f"{file}, row 2: the text is not UTF-8 (invalid start byte)",
        f'{file}, row 3: "text" is null, expected text',
    ]
    assert read_error(file).startswith(bad[0])


def test_a_text_file_that_is_not_utf8_is_skipped_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    (tmp_path / "b.txt").write_bytes(b"b")
    good, bad = read_skipping(tmp_path)
    assert good == ["b"] and bad[0].startswith(
        f"{tmp_path}/a.txt, byte 6: byte 0xe9 at 6 is not UTF-8"
    )


def test_the_error_names_a_line_nested_too_deeply_to_parse(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": ' + b"[" * 200_000)
    assert read_error(tmp_path / "a.jsonl").startswith(f"{tmp_path / 'a.jsonl'}, line 2: ")


def test_the_error_names_the_line_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"one\ntwo\ncaf\xe9\n")
    assert read_error(file).startswith(f"{file}, line 3: byte 0xe9 at 11 is not UTF-8")


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_errors_name_the_bad_table(tmp_path: Path, name: str) -> None:
    file = write_table(tmp_path / name, ["a", "b", "c", "d", None, "f"])
    assert read_error(file).startswith(f'{file}, row 5: "text" is null, expected text')
    assert 'has no column "body" but id, text' in read_error(file, text_field="body")
    empty = write_table(tmp_path / name, [None, None], kind="null")
    assert read_error(empty).startswith(f'{empty}, row 1: "text" is null')
    assert 'column "text" is int64, expected string' in read_error(
        write_table(tmp_path / name, ["a"], kind="int")
    )
    content = write_table(tmp_path / name, ["abc" * 100] * 50).read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert str(file) in read_error(file)
    file.write_bytes(b"no table")
    assert "is not a readable" in read_error(file)


def test_reading_jsonl_needs_neither_datasets_nor_pyarrow(
    corpus_file: Path, repo_root: Path
) -> None:
    script = (
        "import sys; from torchtitan_like.data.text.documents import *; c = find_corpus(sys.argv[1]);"
        "n = sum(1 for p in plan_pieces(c) for _ in read_piece(c, p));"
        "print(n, [m for m in ('datasets', 'pyarrow', 'pandas', 'torch', 'numpy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(corpus_file)]
    printed = subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, check=True
    ).stdout
    assert printed == "28 []\n"
