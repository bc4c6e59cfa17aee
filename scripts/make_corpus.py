"""Make a corpus of English technical text from Debian's documentation packages.

    python scripts/make_corpus.py corpus
    python scripts/make_corpus.py corpus --check

Needs Debian or a relative of it, after `apt-get update`: apt downloads the packages, and dpkg-deb reads
them. Nothing is installed. Writes text.jsonl and code.jsonl (Python's source code) with the fields `text`
and `source` into FOLDER/train and FOLDER/heldout. Trains a tokenizer of 2,048 tokens on every 20th
document of train/text.jsonl, and writes it into FOLDER/tokenizer. Keeps the packages in FOLDER/packages.
The same packages give the same bytes.

- A document is a file of a package: HTML, plain text, info, or Python's source code. Of HTML, the
  text without navigation remains. A file of more than 256 Ki characters becomes several documents.
- Documents of less than 400 characters are left out, and those where less than 6 % of the words are
  frequent English ones: other languages, and lists of names. Python's source code is not tested so.
- Of documents that are equal but for white space, the first one is kept. A document is also left out
  if earlier ones have 80 % of its text in lines of 40 characters or more.
- One document in a hundred is held out, chosen by the hash of its text. Held-out documents are in the
  order of their hashes, so that the first ones are of many packages.

scripts/corpus_manifest.json has the version, the licenses and the digest of each package, and one
digest of the corpus. scripts/corpus_documents.tsv.xz has the digest of each document. They are
compared after each build, and by --check alone. Returns 0 if they are equal, else 1 with the names
of packages and documents that differ. --write-manifest replaces them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import xxhash

from torchtitan_like.data.text.train_tokenizer import save_tokenizer, train_tokenizer
from torchtitan_like.util.output import ProgressLine, show, show_error
from torchtitan_like.util.units import format_bytes

RELEASE = "Debian 12 (bookworm)"
MANIFEST = Path(__file__).with_name("corpus_manifest.json")
DOCUMENTS = Path(__file__).with_name("corpus_documents.tsv.xz")
FILES = [f"{split}/{kind}.jsonl" for split in ("train", "heldout") for kind in ("text", "code")]
PACKAGES = """
ada-reference-manual-2012 anarchism apache2-doc aptitude-doc-en bash-doc bind9-doc cargo-web-doc
cinder-doc cmake-doc cppreference-doc-en-html csound-doc db5.3-doc debian-faq debian-handbook
debian-policy debian-reference-en debmake-doc developers-reference dict-foldoc dict-gcide
dict-jargon dpdk-doc erlang-doc exim4-doc-html fai-doc fortunes gap-doc git-doc gnuplot-doc heat-doc
imagemagick-6-doc installation-guide-amd64 ironic-doc keystone-doc krb5-doc libboost1.74-doc
libpython3.11-stdlib libpython3.11-testsuite libreoffice-help-en-us libstdc++-12-doc
lilypond-doc-html linux-doc-6.1 lirc-doc llvm-16-doc mailutils-doc maint-guide maxima-doc mutt
neutron-doc nim-doc nodejs-doc nova-doc ntpsec-doc octave-doc openafs-doc openjdk-17-doc perl-doc
postfix-doc postgis-doc postgresql-doc-15 python-astropy-doc python-dask-doc python-django-doc
python-flask-doc python-mpmath-doc python-openstackclient-doc python-pandas-doc python-scipy-doc
python-scrapy-doc python-sqlalchemy-doc python-statsmodels-doc python-sympy-doc python-tornado-doc
python-werkzeug-doc python-xarray-doc python3.11-doc qtbase5-doc-html racket-doc rust-doc sbcl-doc
scilab-doc sphinx-doc sqlite3-doc swi-prolog-doc swift-doc twisted-doc vim-doc xen-doc zsh-doc
""".split()

MIN_CHARACTERS, MAX_CHARACTERS = 400, 2**18
FREQUENT = {"the", "of", "and", "to", "in", "is", "that", "for", "be", "are", "with", "this"}
MIN_FREQUENT = 0.06
MIN_LINE, MAX_REPEATED = 40, 0.8
HELD_OUT_IN = 100
TOKENIZER_EVERY, VOCAB_SIZE = 20, 2048

TEXT_NAME = re.compile(r"\.(x?html?|txt|pod|info(-\d+)?|dict\.dz)$|/fortunes/[\w-]+$|\.rst$|\.md$")
NO_DOCUMENT = re.compile(r"/_sources/|/(changelog|copyright|genindex|search\.html|NEWS)", re.I)
MARKUP = re.compile(r"<!--.*?-->|<[!?][^>]*>", re.DOTALL)
TAG = re.compile(r"<(/?)([a-zA-Z][\w-]*)([^>]*)>")
NO_TEXT = {"script", "style", "nav", "footer", "aside", "svg", "button", "title"}
CONTAINERS = {"div", "ul", "ol", "table", "section", "span", "a"}  # which always have an end
NAVIGATION = re.compile(
    r"""(class|role|id)\s*=\s*["']?(sphinxsidebar|related|footer|navigation|nav(header|footer|bar)|"""
    r"headerlink|sidebar|breadcrumbs?|toc|headertop|search)\b"
)
INLINE = set(
    "a abbr acronym b bdi big cite code dfn em font i kbd mark q s samp small span".split()
)
INLINE |= set("strike strong sub sup tt u var wbr img input".split())
DOC_LINK = "link"  # key of the target of the link /usr/share/doc/PACKAGE among its files
LICENSE = re.compile(r"^License: *([\w.+-]+(?: (?:or|and|with) [\w.+ -]{1,50})?)$", re.MULTILINE)
COMMON_LICENSE = re.compile(r"common-licenses/([\w.+-]*\w)")
# In copyright files of free form.
KNOWN_LICENSE = re.compile(
    r"Python Software Foundation License|Apache License|Apache-2.0|Artistic License|BSD|MIT License|"
    r"IBM Public License|GNU (?:Lesser |Library |Free )?\w+ (?:Public )?License|GPL|public domain",
    re.IGNORECASE,
)


class Document(NamedTuple):
    """source: package and path. digest: of the text without differences in white space."""

    source: str
    text: str
    digest: str

    @property
    def is_held_out(self) -> bool:
        return int(self.digest[:8], 16) % HELD_OUT_IN == 0

    @property
    def file(self) -> str:
        """Path of the file that has it, below the folder of the corpus."""
        path = self.source.partition("#")[0].removesuffix(".gz")
        kind = "code" if path.endswith(".py") else "text"
        return f"{'heldout' if self.is_held_out else 'train'}/{kind}.jsonl"

    def write(self, output: TextIO) -> None:
        """Write it as a line of JSON."""
        row = {"text": self.text, "source": self.source}
        output.write(json.dumps(row, ensure_ascii=False) + "\n")

    @classmethod
    def of(cls, source: str, text: str) -> Document:
        normalized = " ".join(text.split())
        return cls(source, text, hashlib.sha256(normalized.encode()).hexdigest()[:16])


# ---- text of files


def html_to_text(page: str) -> str:
    """Return the text of a page: one line for each block, without scripts and navigation."""
    parts: list[str] = []
    skipped, depth, num_pre = "", 0, 0  # the element that is left out, and how often it is open
    pieces = TAG.split(MARKUP.sub("", page))
    for index in range(0, len(pieces), 4):
        if not depth and pieces[index]:
            text = html.unescape(pieces[index])
            if not num_pre:
                text = re.sub(r"\s+", " ", text)
                text = text.lstrip() if parts and parts[-1].endswith("\n") else text
            parts.append(text)
        if index + 1 == len(pieces):
            break
        is_end, name, attributes = (
            pieces[index + 1] == "/",
            pieces[index + 2].lower(),
            pieces[index + 3],
        )
        if depth:
            if name == skipped:
                depth += -1 if is_end else 1
        elif not is_end and (
            name in NO_TEXT or (name in CONTAINERS and NAVIGATION.search(attributes))
        ):
            if not attributes.endswith("/"):
                skipped, depth = name, 1
        elif name == "pre":
            num_pre = max(0, num_pre + (-1 if is_end else 1))
            parts.append("\n")
        elif name in ("td", "th"):
            parts.append("" if is_end else " ")
        elif name not in INLINE:
            parts.append(
                "\n\n" if name in ("p", "table", "ul", "ol", "dl") or name[0] == "h" else "\n"
            )
    return tidy("".join(parts))


def tidy(text: str) -> str:
    """Remove control characters, spaces at the ends of lines, and repeated empty lines."""
    text = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f\xad\ufeff]", "", text.expandtabs(8).replace("\xa0", " ")
    )
    text = re.sub(r" +\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def file_to_text(name: str, content: bytes) -> str:
    """Return the text of a file of a package."""
    if name.endswith((".gz", ".dz")):
        content = gzip.decompress(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if re.search(r"\.x?html?$", name.removesuffix(".gz")):
        return html_to_text(text)
    # Nodes of an info file start with a line of links.
    return tidy(re.sub(r"^File: .*Node: .*$", "", text, flags=re.MULTILINE))


def is_english(text: str) -> bool:
    """Return True if enough of the first words are frequent English ones."""
    words = re.findall(r"[^\W\d_]+", text[:20_000].lower())
    return sum(word in FREQUENT for word in words) >= MIN_FREQUENT * max(1, len(words))


def split_text(text: str) -> list[str]:
    """Split a long text between paragraphs into parts of about `MAX_CHARACTERS`."""
    parts = [""]
    for paragraph in text.split("\n\n") if len(text) > MAX_CHARACTERS else [text]:
        if len(parts[-1]) + len(paragraph) > MAX_CHARACTERS and parts[-1]:
            parts.append("")
        parts[-1] += f"\n\n{paragraph}" if parts[-1] else paragraph
    return parts


def documents_of(package: str, files: dict[str, bytes]) -> Iterator[Document]:
    """Yield the documents of a package in the order of their paths. files: path -> content."""
    has_html = any(re.search(r"\.x?html?(\.gz)?$", name) for name in files)
    for name, content in sorted(files.items()):
        plain = name.removesuffix(".gz")
        is_python = plain.endswith(".py")
        if not is_python and (not TEXT_NAME.search(plain) or NO_DOCUMENT.search(name)):
            continue
        if has_html and plain.endswith((".rst", ".md")):  # sources of the pages
            continue
        parts = split_text(file_to_text(name, content))
        for number, part in enumerate(parts):
            if len(part) >= MIN_CHARACTERS and (is_python or is_english(part)):
                source = f"{package}/{name}" + (f"#{number}" if len(parts) > 1 else "")
                yield Document.of(source, part)


class Deduplicator:
    """Accepts each document that differs enough from all earlier ones."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._lines: set[int] = set()

    def accepts(self, document: Document) -> bool:
        """Return False for a document that is equal to an earlier one, or mostly made of others."""
        if document.digest in self._digests:
            return False
        self._digests.add(document.digest)
        lines = {line.strip() for line in document.text.split("\n") if len(line) >= MIN_LINE}
        hashes = {xxhash.xxh3_64_intdigest(line.encode()): len(line) for line in lines}
        repeated = sum(size for line, size in hashes.items() if line in self._lines)
        if hashes and repeated >= MAX_REPEATED * sum(hashes.values()):
            return False
        self._lines.update(hashes)
        return True


# ---- packages


def download(packages: Iterable[str], versions: dict[str, str], folder: Path) -> dict[str, Path]:
    """Download the packages that are not in `folder`. Returns their files by name.

    versions: to be preferred. Raises RuntimeError for a package that apt cannot download.
    """
    packages = list(packages)
    folder.mkdir(parents=True, exist_ok=True)
    progress = ProgressLine("packages")
    started = time.monotonic()
    files: dict[str, Path] = {}
    for number, name in enumerate(packages, start=1):
        if not any(folder.glob(f"{name}_*.deb")):
            for wanted in (f"{name}={versions[name]}" if name in versions else name, name):
                command = ["apt-get", "download", "-q", wanted]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                if done.returncode == 0:
                    break
            else:
                raise RuntimeError(f"apt-get download {name}: {done.stderr.strip()}")
        files[name] = next(folder.glob(f"{name}_*.deb"))
        progress("download", number, len(packages), time.monotonic() - started)
    return files


def version_of(file: Path) -> str:
    """Return the version of a .deb file."""
    command = ["dpkg-deb", "--field", str(file), "Version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def read_package(file: Path) -> dict[str, bytes]:
    """Return the regular files of a .deb file that may be documents, and its copyright files."""
    files = {}
    command = ["dpkg-deb", "--fsys-tarfile", str(file)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as reader,
        tarfile.open(fileobj=reader.stdout, mode="r|") as archive,
    ):
        for member in archive:
            name = member.name.removeprefix("./")
            plain = name.removesuffix(".gz")
            is_read = TEXT_NAME.search(plain) or plain.endswith((".py", "/copyright"))
            if member.issym() and name == f"usr/share/doc/{file.name.partition('_')[0]}":
                files[DOC_LINK] = member.linkname.encode()
            if member.isfile() and is_read:
                files[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return files


def licenses_of(files: dict[str, bytes], folder: Path) -> list[str]:
    """Return the names of the licenses in the copyright files of a package.

    A package whose folder of documents is a link has them in another one, which is downloaded.
    """
    if DOC_LINK in files:
        owner = files[DOC_LINK].decode()
        files = read_package(download([owner], {}, folder)[owner])
    copies = (file_to_text(n, content) for n, content in files.items() if "/copyright" in n)
    text = "\n".join(copies)
    names = LICENSE.findall(text) or KNOWN_LICENSE.findall(" ".join(text.lower().split()))
    found = {*(name.strip() for name in names), *COMMON_LICENSE.findall(text)}
    return sorted(found) or ["see its copyright file"]


# ---- the corpus and its manifest


def build(files: dict[str, Path], folder: Path) -> tuple[dict[str, Any], list[Document]]:
    """Write the corpus. Returns its manifest, and its documents without their texts."""
    packages: dict[str, Any] = {}
    kept: list[Document] = []
    held_out: list[Document] = []
    deduplicator = Deduplicator()
    total, num_bytes, started = sum(f.stat().st_size for f in files.values()), 0, time.monotonic()
    progress = ProgressLine("", lambda value: format_bytes(int(value)))
    with ExitStack() as stack:
        outputs = {}
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            output = (folder / name).open("w", encoding="utf-8", newline="\n")
            outputs[name] = stack.enter_context(output)
        for package, file in sorted(files.items()):
            content = read_package(file)
            for document in filter(deduplicator.accepts, documents_of(package, content)):
                kept.append(document._replace(text=""))
                if document.is_held_out:
                    held_out.append(document)
                else:
                    document.write(outputs[document.file])
            packages[package] = {
                "version": version_of(file),
                "licenses": licenses_of(content, file.parent),
            }
            num_bytes += file.stat().st_size
            progress("extract", num_bytes, total, time.monotonic() - started)
        for document in sorted(held_out, key=lambda document: document.digest):
            document.write(outputs[document.file])
    manifest = {"release": RELEASE, **summarize(kept)}
    for name, numbers in manifest["packages"].items():
        numbers |= packages[name]
    return manifest, kept


def summarize(documents: Iterable[Document]) -> dict[str, Any]:
    """Return the number and the digest of the documents, of all and of each package."""
    by_package: dict[str, list[str]] = {}
    for document in documents:
        by_package.setdefault(document.source.partition("/")[0], []).append(document.digest)
    packages = {
        name: {"documents": len(digests), "digest": digest_of(digests)}
        for name, digests in sorted(by_package.items())
    }
    every = [digest for digests in by_package.values() for digest in digests]
    return {"documents": len(every), "digest": digest_of(every), "packages": packages}


def digest_of(digests: Iterable[str]) -> str:
    """Return one digest of documents in any order."""
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:32]


def read_corpus(folder: Path) -> list[Document]:
    """Return the documents of a corpus without their texts."""
    documents = []
    for name in FILES:
        with (folder / name).open(encoding="utf-8") as file:
            rows = map(json.loads, file)
            documents += [Document.of(row["source"], row["text"])._replace(text="") for row in rows]
    return documents


def write_manifest(manifest: dict[str, Any], documents: Iterable[Document]) -> None:
    """Replace the committed manifest."""
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    lines = sorted(f"{document.source}\t{document.digest}\n" for document in documents)
    DOCUMENTS.write_bytes(lzma.compress("".join(lines).encode(), preset=9))


def differences(documents: Iterable[Document]) -> list[str]:
    """Return what differs from the committed manifest: packages, then documents."""
    expected = json.loads(MANIFEST.read_text())
    actual = summarize(documents)
    if actual["digest"] == expected["digest"]:
        return []
    lines = [
        "The corpus differs from the manifest. If packages have other versions: delete the folder "
        "`packages`, run `apt-get update`, and make the corpus again"
    ]
    for name in sorted(expected["packages"].keys() | actual["packages"].keys()):
        before, after = (each["packages"].get(name, {}) for each in (expected, actual))
        if before.get("digest") != after.get("digest"):
            counts = [each.get("documents", 0) for each in (before, after)]
            lines.append(f"{name} differs: expected {counts[0]} documents, found {counts[1]}")
    rows = lzma.decompress(DOCUMENTS.read_bytes()).decode().splitlines()
    committed = dict(row.split("\t") for row in rows)
    present = {document.source: document.digest for document in documents}
    for source in sorted(committed.keys() | present.keys()):
        if committed.get(source) != present.get(source):
            kind = "differs" if source in committed.keys() & present.keys() else "is new"
            lines.append(f"  {source} {kind if source in present else 'is missing'}")
    return lines


def main(argv: list[str]) -> int:
    """Make or check the corpus. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the corpus is, or will be")
    parser.add_argument("--check", action="store_true", help="only compare it with the manifest")
    parser.add_argument("--write-manifest", action="store_true", help="replace the manifest")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    if arguments.check:
        documents = read_corpus(folder)
    else:
        recorded = json.loads(MANIFEST.read_text())["packages"] if MANIFEST.exists() else {}
        versions = {name: package["version"] for name, package in recorded.items()}
        files = download(PACKAGES, versions, folder / "packages")
        manifest, documents = build(files, folder)
        show("Training the tokenizer")
        with (folder / "train/text.jsonl").open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in islice(lines, 0, None, TOKENIZER_EVERY)]
        save_tokenizer(train_tokenizer(texts, VOCAB_SIZE), folder / "tokenizer")
        if arguments.write_manifest:
            write_manifest(manifest, documents)
    found = differences(documents)
    for line in found:
        show_error(line)
    size = sum((folder / name).stat().st_size for name in FILES)
    held_out = sum(document.is_held_out for document in documents)
    show(
        f"{format_bytes(size)}, {len(documents):,} documents, {held_out:,} of them held out, digest "
        f"{summarize(documents)['digest']}: {'differs from' if found else 'equals'} the manifest"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
