"""scripts/make_corpus.py: text of pages, documents that are left out, digests and the manifest."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from scripts import make_corpus
from scripts.make_corpus import (
    Deduplicator,
    Document,
    documents_of,
    html_to_text,
    licenses_of,
    split_text,
)

PROSE = "This is the text of a page that is about the use of a tool, and it is in English. "
PAGE = """<!DOCTYPE html><html><head><title>T</title><style>a {}</style></head><body>
<div class="related" role="navigation"><div>next</div> | index</div><!-- a <b> comment -->
<h1>The tool<a class="headerlink" href="#t">#</a></h1>
<p>Use <code>x &lt; y</code>,
  or&nbsp;<em>not</em>.</p><script>if (a < b) {}</script>
<pre>  indented
    code</pre><ul><li> one</li><li>two</li></ul>
<table><tr><td>a</td><td>b</td></tr></table><footer>Copyright</footer></body></html>"""


def test_a_page_becomes_text_without_scripts_and_navigation() -> None:
    lines = [line for line in html_to_text(PAGE).split("\n") if line]
    assert lines == [
        "The tool", "Use x < y, or not.", "  indented", "    code", "one", "two", " a b",
    ]  # fmt: skip


def test_other_languages_lists_and_sources_of_pages_are_no_documents() -> None:
    page = f"<p>{PROSE * 9}</p>".encode()
    french = f"<p>{'Ceci est un texte qui parle de la page et des outils. ' * 20}</p>".encode()
    files = {
        "usr/share/doc/a/b.html": page,
        "usr/share/doc/a/a.txt.gz": gzip.compress(b"A" + PROSE.encode() * 9),
        "usr/share/doc/a/c.html": french,
        "usr/share/doc/a/index.html": b"<p>alpha beta gamma</p>" * 99,
        "usr/share/doc/a/short.html": PROSE.encode(),
        "usr/share/doc/a/_sources/b.txt": page,
        "usr/share/doc/a/b.rst": page,
        "usr/share/doc/a/changelog.html": page,
        "usr/share/doc/a/picture.png": page,
        "usr/lib/python3/m.py": b"x = 1\n" * 99,
    }
    found = [document.source for document in documents_of("a", files)]
    assert found == [f"a/{name}" for name in (
        "usr/lib/python3/m.py", "usr/share/doc/a/a.txt.gz", "usr/share/doc/a/b.html",
    )]  # fmt: skip


def test_long_texts_are_split_between_paragraphs() -> None:
    text = "\n\n".join(["x" * 1000] * 600)
    parts = split_text(text)
    assert "\n\n".join(parts) == text and len(parts) == 3
    assert max(map(len, parts)) <= make_corpus.MAX_CHARACTERS
    assert split_text(PROSE) == [PROSE]


def test_equal_and_nearly_equal_documents_are_left_out() -> None:
    lines = [f"{number}: {PROSE}" for number in range(10)]
    first = Document.of("a", "\n".join(lines))
    accepts = Deduplicator().accepts
    assert accepts(first)
    assert not accepts(Document.of("b", "\n\n".join(line + "  " for line in lines)))
    assert not accepts(Document.of("c", "\n".join([*lines[:9], *("new " + x for x in lines[9:])])))
    assert accepts(Document.of("d", "\n".join([*lines[:7], *("new " + x for x in lines[7:])])))
    assert accepts(Document.of("e", "short lines\n" * 9))
    assert not accepts(Document.of("f", "short  lines\n" * 9))


def test_licenses_are_named() -> None:
    text = b"Files: *\nLicense: PSF-2\n text\n\nSee /usr/share/common-licenses/GPL-2.\n"
    assert licenses_of({"usr/share/doc/a/copyright": text}, Path()) == ["GPL-2", "PSF-2"]
    assert licenses_of({}, Path()) == ["see its copyright file"]
    text = b"It has the Python Software\n Foundation License, or is in the public domain."
    expected = ["public domain", "python software foundation license"]
    assert licenses_of({"usr/share/doc/a/copyright": text}, Path()) == expected


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two packages of 150 pages and a program each, in place of Debian's, and a manifest of them."""
    monkeypatch.setattr(make_corpus, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(make_corpus, "DOCUMENTS", tmp_path / "documents.tsv.xz")
    monkeypatch.setattr(make_corpus, "PACKAGES", ["b-doc", "a-doc"])
    files = {}
    for name in ("a-doc", "b-doc"):
        root = tmp_path / name
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1.{len(files)}\nArchitecture: all\n"
            "Maintainer: A <a@b.org>\nDescription: pages\n"
        )
        docs = root / f"usr/share/doc/{name}"
        docs.mkdir(parents=True)
        (docs / "copyright").write_text("License: Expat\n")
        for number in range(150):
            text = "".join(f"<p>{name} {number} {line} {PROSE}</p>" for line in range(9))
            (docs / f"{number}.html").write_text(text)
        (docs / "example.py").write_text("\n".join(f"{name[0]}_{i} = {i}" for i in range(99)))
        (docs / "copy.html").write_text((docs / "7.html").read_text().replace("<p>", "<p> "))
        files[name] = tmp_path / "corpus/packages" / f"{name}_1_all.deb"
        files[name].parent.mkdir(parents=True, exist_ok=True)
        command = ["dpkg-deb", "--root-owner-group", "--build", str(root), str(files[name])]
        subprocess.run(command, check=True, capture_output=True)
    return files


def test_the_corpus_has_a_manifest_that_names_differences(
    packages: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    assert make_corpus.main([str(folder), "--write-manifest"]) == 0
    assert "302 documents" in capsys.readouterr().out
    files = [*make_corpus.FILES, "tokenizer/tokenizer.json"]
    content = {name: (folder / name).read_bytes() for name in files}
    rows = [json.loads(line) for name in make_corpus.FILES for line in content[name].splitlines()]
    assert len(rows) == 302 and {row["source"].split("/")[0] for row in rows} == {*packages}
    assert 0 < content["heldout/text.jsonl"].count(b"\n") < 15
    programs = content["train/code.jsonl"] + content["heldout/code.jsonl"]
    assert [json.loads(line)["source"][-10:] for line in programs.splitlines()] == [
        "example.py"
    ] * 2
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["packages"]["b-doc"]["version"] == "1.1"
    assert manifest["packages"]["a-doc"]["licenses"] == ["Expat"]

    assert make_corpus.main([str(folder)]) == 0  # again, from the same packages
    assert {name: (folder / name).read_bytes() for name in content} == content
    assert make_corpus.main([str(folder), "--check"]) == 0
    assert manifest["digest"] in capsys.readouterr().out

    first, *others = content["train/text.jsonl"].splitlines(keepends=True)
    (folder / "train/text.jsonl").write_bytes(b"".join(others))
    assert make_corpus.main([str(folder), "--check"]) == 1
    captured = capsys.readouterr()
    assert f"{json.loads(first)['source']} is missing" in captured.err
    assert "a-doc differs: expected 151 documents, found 150" in captured.err
    assert "differs from the manifest" in captured.out
