"""With random settings, ranks receive the batches that an independent reader computes.

The seed selects the files (formats, sizes, damage), the settings, the layouts, and the step of the
restart. To run one seed: pytest tests/unit/data/test_fuzz.py -m "" -k "fuzz and 123".
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
from torchtitan_like.data.batches.iterators import TrainBatches
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.samples import streaming
from torchtitan_like.data.text import documents as document_files
from torchtitan_like.data.text.tokenizer import Tokenizer

from .conftest import ASSETS
from .independent_reader import Row, Run, Source, steps
from .token_writers import write_flat, write_megatron, write_npy

NUM_IN_EVERY_RUN, NUM_NIGHTLY = 25, 550
WORDS = [
    "to",
    "be",
    "or",
    "not",
    "Whether",
    "'tis",
    "nobler",
    "—",
    "🙂",
    "sea of troubles,",
    "x",
    "\n",
    "  ",
]
BLOCK_BYTES, WINDOW_BYTES = 300, 1_000  # small, so that streams of small files have many


@cache
def inner_tokenizer() -> tokenizers.Tokenizer:
    """Load the tokenizer with the `tokenizers` library, without the package's wrapper."""
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
    """One random run: the user's settings, and the same settings for the independent reader."""

    run: Run
    training: dict[str, Any]
    data: dict[str, Any]
    layouts: tuple[Layout, Layout]  # before and after the restart
    num_steps: int
    resume_after: int
    with_positions: bool
    kinds: list[str] = field(default_factory=list)


class CaseMaker:
    """Draws a case and writes its files into ``folder``."""

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
        drawn = [self._source(name, is_alone=num_sources == 1) for name in names]
        sources = [source for source, _ in drawn]
        settings = {source.name: options for source, options in drawn}
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
            run,
            training,
            data,
            layouts,
            num_steps,
            draw.randint(1, min(num_steps - 1, 10)),
            self._often(0.5),
            self.kinds,
        )

    def _draw_weights(self, source: Source, settings: dict[str, Any], num_steps: int) -> None:
        draw = self.random
        source.weight = draw.choice([0.01, 0.3, 1.0, 2.5, 3.7, 8.0])
        if self._often(0.25):
            first = draw.randint(2, min(num_steps, 10))
            source.weight_from = [(first, draw.choice([0.5, 4.0]))]
        settings |= {
            "weight": source.weight,
            "weight_from": [list(pair) for pair in source.weight_from],
        }

    def _draw_batch(
        self, num_steps: int
    ) -> tuple[dict[str, Any], tuple[Layout, Layout], list[tuple[int, int]]]:
        """Draw a global batch size that two layouts divide, sometimes with a batch ramp."""
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
        return (
            {"global_batch_size": total, "batch_ramp": ramp},
            (first, second),
            ramp_sizes(ramp, total),
        )

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
            source.max_epochs = settings["max_epochs"] = draw.choice(
                [1, 2] if self.ends else [0, 0, 1, 2, 3]
            )
        if kind in ("npy", "flat", "megatron"):
            settings |= {"format": "tokens"}
            source.blocks = [self._token_files(kind, folder)]
        else:
            self._text_files(kind, folder, source, settings)
        return source, settings

    def _words(self, max_words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, max_words)))

    def _encoded(self, text: str) -> list[int]:
        inner = inner_tokenizer()
        ids = inner.encode(text, add_special_tokens=False).ids
        bos = [inner.token_to_id("<|begin_of_text|>")] if self.add_bos else []
        return [*bos, *ids, *([self.eos] if self.add_eos else [])] if ids else []

    def _token_files(self, kind: str, folder: Path) -> list[list[int]]:
        """Write token files and return their documents.

        In files without an index, a document ends at EOS or at the end of the file.
        """
        draw = self.random
        all_documents = []
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
                    documents[-1].pop()  # the last document ends at the end of the file
                documents = [document for document in documents if document]
                flat = [token for document in documents for token in document]
                if kind == "npy":
                    write_npy(
                        file.with_suffix(".npy"), flat, draw.choice(["<u2", "<i4", "<i8", "<u4"])
                    )
                else:
                    write_flat(file.with_suffix(".bin"), flat)
            all_documents += documents
        return all_documents

    def _text_files(
        self, kind: str, folder: Path, source: Source, settings: dict[str, Any]
    ) -> None:
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
                pq.write_table(
                    pa.table({field_name: texts}), folder / f"{name}.parquet", row_group_size=rows
                )
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
                file_blocks: list[list[list[int]]] = [
                    [] for _ in range(-(-len(content) // BLOCK_BYTES))
                ]
                for offset, text in lines:
                    file_blocks[offset // BLOCK_BYTES].append(self._encoded(text))
                blocks += file_blocks
            num_bytes += len(content)
        if not is_stream:
            source.blocks = [[document for block in blocks for document in block]]
            return
        source.blocks = blocks
        window_bytes = max(WINDOW_BYTES, 4 * self.seq_len)
        source.blocks_per_window = min(
            max(1, round(window_bytes * len(blocks) / num_bytes)), len(blocks)
        )

    def _json_lines(self, texts: list[str], field_name: str) -> tuple[bytes, list[tuple[int, str]]]:
        """Return the file's content, and the byte offset and text of each readable line."""
        draw = self.random
        content, lines = b"", []
        for text in texts:
            if self._often(0.1):
                content += draw.choice([b"\n", b"   \n"])
            if self.skips_bad_records and self._often(0.15):
                content += draw.choice(
                    [
                        b"no json\n",
                        b'{"other": 1}\n',
                        b'{"text": 5, "content": []}\n',
                        b"\xff\xfe\n",
                    ]
                )
            lines.append((len(content), text))
            row = {"id": len(lines), field_name: text}
            content += json.dumps(row, ensure_ascii=self._often(0.5)).encode() + b"\n"
        return (content[:-1] if self._often(0.3) else content), lines


def ramp_sizes(ramp: list[int], total: int) -> list[tuple[int, int]]:
    """Return pairs (first step, batch size), computed one step at a time."""
    start, increment, samples = ramp
    num_increments = (total - start) // increment
    sizes: list[tuple[int, int]] = []
    step, num_read, size = 1, 0, start
    while size < total:
        parts_read = sum(
            num_read * num_increments >= part * samples for part in range(1, num_increments + 1)
        )
        size = start + parts_read * increment
        if not sizes or sizes[-1][1] != size:
            sizes.append((step, size))
        step, num_read = step + 1, num_read + size
    return sizes


def build(case: Case, tokenizer: Tokenizer, layout: Layout, rank: int) -> TrainBatches:
    return DataBuilder(
        Data(**case.data),
        tokenizer=tokenizer,
        dump_folder=case.data["cache_folder"],
        dp_rank=rank,
        dp_size=layout.dp,
        with_positions=case.with_positions,
    ).train_batches(
        Training(**case.training, local_batch_size=layout.local),
        seed=case.run.seed,
        global_batch_size=layout.accumulation * layout.dp * layout.local,
    )


def rows_fed(
    batches: list[TrainBatches], case: Case, layout: Layout
) -> Iterator[tuple[dict[int, Row], int]]:
    """Yield the rows of all ranks by position, and the digest, for each step."""
    while True:
        rank_batches = []
        for rank in batches:
            batch = next(rank, None)
            if batch is None:
                break
            rank_batches.append(batch)
        if not rank_batches:
            return
        assert len(rank_batches) == layout.dp, "some ranks ended before the others"
        rows = {}
        for batch in rank_batches:
            for micro, first in enumerate(batch.first_samples):
                for index in range(layout.local):
                    labels = batch.labels[micro, index].tolist()
                    source = int(batch.sources[micro, index])
                    tokens = batch.tokens[micro, index].tolist()
                    positions = (
                        [] if batch.positions is None else batch.positions[micro, index].tolist()
                    )
                    rows[first + index] = Row(source, tokens, labels, positions, [])
        assert len({(batch.position, batch.num_samples) for batch in rank_batches}) == 1
        num_valid = sum(label != -100 for row in rows.values() for label in row.labels)
        assert sum(batch.num_valid_tokens for batch in rank_batches) == num_valid
        yield rows, sum(batch.digest for batch in rank_batches) % 2**64


def check(case: Case, tokenizer: Tokenizer) -> None:
    expected = list(steps(case.run, case.num_steps))
    layout, second_layout = case.layouts
    ranks = [build(case, tokenizer, layout, rank) for rank in range(layout.dp)]
    fed = rows_fed(ranks, case, layout)
    for step, expected_rows in enumerate(expected, start=1):
        rows, digest = next(fed)
        assert (
            digest == sum(row.digest(position) for position, row in expected_rows.items()) % 2**64
        ), f"step {step}"
        for position, row in rows.items():
            if position not in expected_rows:
                assert set(row.labels) == {-100}, f"step {step} has labels at position {position}"
                continue
            expected_row = expected_rows[position]
            assert row.tokens == expected_row.tokens, f"step {step}, position {position}"
            assert row.labels == expected_row.labels, f"step {step}, position {position}"
            if case.with_positions:
                # Positions of padding are irrelevant.
                num_real = min(len(expected_row.real), case.run.seq_len)
                assert row.positions[:num_real] == expected_row.positions[:num_real], (
                    f"step {step}, position {position}"
                )
            assert row.source == expected_row.source
        assert expected_rows.keys() <= rows.keys(), f"step {step}"
        if step == case.resume_after and step < len(expected):
            state = json.loads(json.dumps(ranks[0].state_dict()))
            ranks = [
                build(case, tokenizer, second_layout, rank) for rank in range(second_layout.dp)
            ]
            for rank in ranks:
                rank.load_state_dict(state)
            fed = rows_fed(ranks, case, second_layout)
    if len(expected) < case.num_steps:
        assert next(fed, None) is None, "batches after the end of the data"


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_IN_EVERY_RUN),
        *(
            pytest.param(seed, marks=pytest.mark.nightly)
            for seed in range(NUM_IN_EVERY_RUN, NUM_NIGHTLY)
        ),
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
    """Without this check, a generator that stops drawing a feature would go unnoticed."""
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
        "an end": sum(
            len(list(steps(case.run, case.num_steps))) < case.num_steps for case in cases
        ),
        "another layout": sum(case.layouts[0].dp != case.layouts[1].dp for case in cases),
        "best fit": sum(case.run.best_fit for case in cases),
        "seq_len 1": sum(case.run.seq_len == 1 for case in cases),
    }
    assert min(features.values()) >= 2, features
