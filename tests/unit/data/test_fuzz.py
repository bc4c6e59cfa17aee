"""Random data settings: what ranks are fed must equal what an independent reader reads.

A seed decides the files (formats, sizes, damage), the settings, the layout, and where the run is
resumed on another layout. To look at one: pytest tests/unit/data/test_fuzz.py -m "" -k "fuzz and 123".
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from torchtitan_like.config.sections_training import Data, Training
from torchtitan_like.data.batches.training import TrainBatches
from torchtitan_like.data.build import build_train_batches
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.text import documents as document_files
from torchtitan_like.data.text.tokenizer import Tokenizer

from .conftest import ASSETS
from .independent_reader import Row, Run, Source, steps
from .token_writers import write_flat, write_megatron, write_npy

NUM_IN_EVERY_RUN, NUM_NIGHTLY = 50, 550
WORDS = ["to", "be", "or", "not", "Whether", "'tis", "nobler", "—", "🙂", "sea of troubles,", "x", "\n", "  "]
BLOCK_BYTES, WINDOW_BYTES = 300, 1_000  # of streams: small, so that small files have many


@cache
def inner_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer's file as its own library reads it."""
    inner = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    inner.encode_special_tokens = True
    return inner


@dataclass
class Layout:
    dp: int
    local: int
    accumulation: int


@dataclass
class Case:
    """One random run: its settings as a user gives them, and as the independent reader takes them."""

    run: Run
    training: dict[str, Any]
    data: dict[str, Any]
    layouts: tuple[Layout, Layout]  # before and after the restart
    num_steps: int
    resume_after: int
    with_positions: bool
    kinds: list[str] = field(default_factory=list)


class CaseMaker:
    """Draws a case, and writes its files into ``folder``."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.add_bos = self._often(0.8)
        self.add_eos = self._often(0.8)
        self.skips_bad_records = self._often(0.3)
        self.ends = self._often(0.3)  # every source has max_epochs
        self.seq_len = self.random.choice([5, 8, 16, 33] if self.ends else [1, 2, 3, 5, 8, 16, 33])
        self.kinds: list[str] = []
        self.eos = inner_tokenizer().token_to_id("<|end_of_text|>")

    def _often(self, share: float) -> bool:
        return self.random.random() < share

    def make(self) -> Case:
        draw = self.random
        num_sources = draw.choice([1, 1, 2, 2, 3, 5])
        names = ["web", "code", "books", "prose", "verse"][:num_sources]
        num_steps = 150 if self.ends else draw.randint(4, 14)
        written = [self._source(name, is_alone=num_sources == 1) for name in names]
        sources = [source for source, _ in written]
        settings = {source.name: given for source, given in written}
        if num_sources > 1:
            for source in sources:
                self._draw_weights(source, settings[source.name], num_steps)
        training, layouts, sizes = self._draw_batch(num_steps)
        skip_steps = self._draw_skips(num_steps)
        run = Run(
            sources, self.seq_len, seed=draw.choice([0, 1, draw.getrandbits(31), draw.getrandbits(63)]),
            step_sizes=sizes, skip_steps=skip_steps, shuffle=self._often(0.8), best_fit=self._often(0.3),
        )  # fmt: skip
        run.mask_document_starts = run.best_fit or self._often(0.4)
        data = {
            "sources": settings,
            "cache_folder": str(self.folder / "cache"),
            "shuffle": run.shuffle,
            "packing": "best_fit" if run.best_fit else "concat",
            "mask_document_starts": run.mask_document_starts,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "on_bad_record": "skip" if self.skips_bad_records else "error",
        }
        training |= {"seq_len": self.seq_len, "skip_steps": [list(pair) for pair in skip_steps]}
        return Case(
            run, training, data, layouts, num_steps, draw.randint(1, min(num_steps - 1, 10)), self._often(0.5), self.kinds
        )

    def _draw_weights(self, source: Source, settings: dict[str, Any], num_steps: int) -> None:
        draw = self.random
        source.weight = draw.choice([0.01, 0.3, 1.0, 2.5, 3.7, 8.0])
        if self._often(0.25):
            first = draw.randint(2, min(num_steps, 10))
            source.weight_from = [(first, draw.choice([0.5, 4.0]))]
        settings |= {"weight": source.weight, "weight_from": [list(pair) for pair in source.weight_from]}

    def _draw_batch(self, num_steps: int) -> tuple[dict[str, Any], tuple[Layout, Layout], list[tuple[int, int]]]:
        """A global batch that both layouts divide, perhaps with a ramp towards it."""
        draw = self.random
        unit = draw.choice([1, 2, 4, 6])
        layouts_of_unit = [(dp, unit // dp) for dp in (1, 2, 4) if unit % dp == 0]
        total = unit * draw.choice([1, 2, 3, 4])
        chosen = [draw.choice(layouts_of_unit) for _ in range(2)]
        first, second = (Layout(dp, local, total // (dp * local)) for dp, local in chosen)
        if total == unit or self._often(0.7):
            return {"global_batch_size": total}, (first, second), [(1, total)]
        samples = draw.randint(1, total * min(num_steps, 10))
        ramp = [unit, unit, samples]
        return {"global_batch_size": total, "batch_ramp": ramp}, (first, second), ramp_sizes(ramp, total)

    def _draw_skips(self, num_steps: int) -> list[tuple[int, int]]:
        pairs, first = [], 1
        for _ in range(self.random.choice([0, 0, 1, 2])):
            first = self.random.randint(first, first + min(num_steps, 10))
            last = first + self.random.randint(0, 3)
            pairs.append((first, last))
            first = last + 1 if self._often(0.5) else first
        return pairs

    # ---- sources and their files

    def _source(self, name: str, *, is_alone: bool) -> tuple[Source, dict[str, Any]]:
        draw = self.random
        kinds = ["jsonl", "jsonl.gz", "text", "parquet", "npy", "flat", "megatron"]
        kinds += [] if self.ends and not is_alone else ["stream jsonl", "stream gz", "stream text"]
        kind = draw.choice(kinds)
        self.kinds.append(kind)
        folder = self.folder / name
        folder.mkdir()
        settings: dict[str, Any] = {"path": str(folder)}
        source = Source(name, [])
        if not kind.startswith("stream") or is_alone:
            source.max_epochs = settings["max_epochs"] = draw.choice([1, 2] if self.ends else [0, 0, 1, 2, 3])
        if kind in ("npy", "flat", "megatron"):
            settings |= {"format": "tokens"}
            source.blocks = [self._token_files(kind, folder)]
        else:
            self._text_files(kind, folder, source, settings)
        return source, settings

    def _words(self, most: int) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, most)))

    def _encoded(self, text: str) -> list[int]:
        inner = inner_tokenizer()
        ids = inner.encode(text, add_special_tokens=False).ids
        bos = [inner.token_to_id("<|begin_of_text|>")] if self.add_bos else []
        return [*bos, *ids, *([self.eos] if self.add_eos else [])] if ids else []

    def _token_files(self, kind: str, folder: Path) -> list[list[int]]:
        """Documents of token ids; those of files without an index end with the EOS or with the file."""
        draw = self.random
        found = []
        for number in range(draw.randint(1, 3)):
            documents = [
                [draw.randrange(100, 1900) for _ in range(draw.randint(1, 50))] + [self.eos]
                for _ in range(draw.randint(2, 12))
            ]
            file = folder / f"part-{number}"
            if kind == "megatron":
                write_megatron(file, [[document] for document in documents])
            else:
                if self._often(0.5):
                    documents[-1].pop()  # the file ends its last document
                documents = [document for document in documents if document]
                flat = [token for document in documents for token in document]
                if kind == "npy":
                    write_npy(file.with_suffix(".npy"), flat, draw.choice(["<u2", "<i4", "<i8", "<u4"]))
                else:
                    write_flat(file.with_suffix(".bin"), flat)
            found += documents
        return found

    def _text_files(self, kind: str, folder: Path, source: Source, settings: dict[str, Any]) -> None:
        draw = self.random
        field_name = draw.choice(["text", "text", "content"])
        if not kind.endswith("text"):
            settings["text_field"] = field_name
        is_stream = source.is_stream = kind.startswith("stream")
        if is_stream:
            settings["streaming"] = True
        blocks: list[list[list[int]]] = []
        num_bytes = 0
        for number in range(draw.randint(1, 4)):
            texts = [self._words(40) for _ in range(draw.randint(3, 15))]
            if self._often(0.3):
                texts.insert(draw.randrange(len(texts)), "")
            name = f"part-{number}"
            if kind.endswith("text"):
                content = "\n".join(texts).encode()
                (folder / f"{name}.txt").write_bytes(content)
                blocks.append([self._encoded(content.decode())])
            elif kind == "parquet":
                rows = draw.randint(1, 8)
                pq.write_table(pa.table({field_name: texts}), folder / f"{name}.parquet", row_group_size=rows)
                blocks.append([self._encoded(text) for text in texts])
                continue
            else:
                content, lines = self._json_lines(texts, field_name)
                if kind.endswith("gz"):
                    packed = gzip.compress(content, mtime=0)
                    (folder / f"{name}.jsonl.gz").write_bytes(packed)
                    blocks.append([self._encoded(text) for _, text in lines])
                    num_bytes += len(packed) * 5 // 2
                    continue
                (folder / f"{name}.jsonl").write_bytes(content)
                of_file: list[list[list[int]]] = [[] for _ in range(-(-len(content) // BLOCK_BYTES))]
                for begin, text in lines:
                    of_file[begin // BLOCK_BYTES].append(self._encoded(text))
                blocks += of_file
            num_bytes += len(content)
        if not is_stream:
            source.blocks = [[document for block in blocks for document in block]]
            return
        source.blocks = blocks
        window_bytes = max(WINDOW_BYTES, 4 * self.seq_len)
        source.blocks_per_window = min(max(1, round(window_bytes * len(blocks) / num_bytes)), len(blocks))

    def _json_lines(self, texts: list[str], field_name: str) -> tuple[bytes, list[tuple[int, str]]]:
        """The file's content, and of each readable line where it begins and its text."""
        draw = self.random
        content, lines = b"", []
        for text in texts:
            if self._often(0.1):
                content += draw.choice([b"\n", b"   \n"])
            if self.skips_bad_records and self._often(0.15):
                content += draw.choice([b"no json\n", b'{"other": 1}\n', b'{"text": 5, "content": []}\n', b"\xff\xfe\n"])
            lines.append((len(content), text))
            row = {"id": len(lines), field_name: text}
            content += json.dumps(row, ensure_ascii=self._often(0.5)).encode() + b"\n"
        return (content[:-1] if self._often(0.3) else content), lines


def ramp_sizes(ramp: list[int], total: int) -> list[tuple[int, int]]:
    """Steps by steps: the size grows whenever the next part of the ramp's samples has been read."""
    start, increment, samples = ramp
    num_increments = (total - start) // increment
    sizes: list[tuple[int, int]] = []
    step, num_read, size = 1, 0, start
    while size < total:
        parts_read = sum(num_read * num_increments >= part * samples for part in range(1, num_increments + 1))
        size = start + parts_read * increment
        if not sizes or sizes[-1][1] != size:
            sizes.append((step, size))
        step, num_read = step + 1, num_read + size
    return sizes


def build(case: Case, tokenizer: Tokenizer, layout: Layout, rank: int) -> TrainBatches:
    return build_train_batches(
        Training(**case.training, local_batch_size=layout.local),
        Data(**case.data),
        tokenizer=tokenizer,
        dump_folder=case.data["cache_folder"],
        seed=case.run.seed,
        dp_rank=rank,
        dp_size=layout.dp,
        num_accumulation=layout.accumulation,
        with_positions=case.with_positions,
    )


def rows_fed(batches: list[TrainBatches], case: Case, layout: Layout) -> Iterator[tuple[dict[int, Row], int]]:
    """What all ranks together are fed in each step: rows by position without padding, and the step's digest."""
    while True:
        of_ranks = []
        for rank in batches:
            batch = next(rank, None)
            if batch is None:
                break
            of_ranks.append(batch)
        if not of_ranks:
            return
        assert len(of_ranks) == layout.dp, "all ranks end at the same step"
        rows = {}
        for batch in of_ranks:
            for micro, first in enumerate(batch.first_samples):
                for index in range(layout.local):
                    labels = batch.labels[micro, index].tolist()
                    source = int(batch.sources[micro, index])
                    tokens = batch.tokens[micro, index].tolist()
                    positions = [] if batch.positions is None else batch.positions[micro, index].tolist()
                    rows[first + index] = Row(source, tokens, labels, positions, [])
        assert len({(batch.position, batch.num_samples) for batch in of_ranks}) == 1
        num_valid = sum(label != -100 for row in rows.values() for label in row.labels)
        assert sum(batch.num_valid_tokens for batch in of_ranks) == num_valid
        yield rows, sum(batch.digest for batch in of_ranks) % 2**64


def check(case: Case, tokenizer: Tokenizer) -> None:
    expected = list(steps(case.run, case.num_steps))
    layout, other = case.layouts
    ranks = [build(case, tokenizer, layout, rank) for rank in range(layout.dp)]
    fed = rows_fed(ranks, case, layout)
    for step, wanted in enumerate(expected, start=1):
        rows, digest = next(fed)
        assert digest == sum(row.digest(position) for position, row in wanted.items()) % 2**64, f"step {step}"
        for position, row in rows.items():
            if position not in wanted:
                assert set(row.labels) == {-100}, f"step {step} learns from position {position}"
                continue
            right = wanted[position]
            assert row.tokens == right.tokens, f"step {step}, position {position}"
            assert row.labels == right.labels, f"step {step}, position {position}"
            if case.with_positions:
                # Positions of padding have no effect.
                num_real = min(len(right.real), case.run.seq_len)
                assert row.positions[:num_real] == right.positions[:num_real], f"step {step}, position {position}"
            assert row.source == right.source
        assert wanted.keys() <= rows.keys(), f"step {step}"
        if step == case.resume_after and step < len(expected):
            state = json.loads(json.dumps(ranks[0].state_dict()))
            ranks = [build(case, tokenizer, other, rank) for rank in range(other.dp)]
            for rank in ranks:
                rank.load_state_dict(state)
            fed = rows_fed(ranks, case, other)
    if len(expected) < case.num_steps:
        assert next(fed, None) is None, "the text has ended"


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_IN_EVERY_RUN),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(NUM_IN_EVERY_RUN, NUM_NIGHTLY)),
    ],
)
def test_fuzzed_settings_equal_the_independent_reader(
    seed: int, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "WINDOW_BYTES", WINDOW_BYTES)
    monkeypatch.setattr(streaming, "MIN_SAMPLES", 1)
    monkeypatch.setattr(document_files, "BLOCK_BYTES", BLOCK_BYTES)
    check(CaseMaker(seed, tmp_path).make(), tokenizer)


def test_cases_cover_every_setting(tmp_path: Path) -> None:
    """The drawn settings of every run have each feature several times: a generator that lost one would not be seen."""
    cases = []
    for seed in range(NUM_IN_EVERY_RUN):
        (tmp_path / str(seed)).mkdir()
        cases.append(CaseMaker(seed, tmp_path / str(seed)).make())
    kinds = [kind for case in cases for kind in case.kinds]
    assert min(kinds.count(kind) for kind in set(kinds)) >= 2 and len(set(kinds)) == 10
    features = {
        "ramp": sum("batch_ramp" in case.training for case in cases),
        "skips": sum(bool(case.run.skip_steps) for case in cases),
        "weights that change": sum(any(s.weight_from for s in case.run.sources) for case in cases),
        "an end": sum(len(list(steps(case.run, case.num_steps))) < case.num_steps for case in cases),
        "another layout": sum(case.layouts[0].dp != case.layouts[1].dp for case in cases),
        "best fit": sum(case.run.best_fit for case in cases),
        "seq_len 1": sum(case.run.seq_len == 1 for case in cases),
    }
    assert min(features.values()) >= 2, features

