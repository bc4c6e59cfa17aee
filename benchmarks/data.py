"""Read batches and tokenize text, compared with simple baselines.

    python -m benchmarks.data [--rounds 9] [--copies 6] [--folder DIR]
    python -m benchmarks.data --documents 10_000_000
    python -m benchmarks.data --stream 10_000_000
    python -m benchmarks.data --checks

Each row runs in a new process with one thread. Each round measures every variant once in random
order, so that noise affects all variants equally. The table has tokens per second of CPU time:
medians of the rates, and of the ratios within a round. The last column is the ratio of the best
rounds, which have the least noise.

- reading: shuffled training batches of 8 samples of 2,048 tokens, with the digest of each step. The
  baseline reads random samples of a memory-mapped file into two int64 tensors.
- tokenizing: JSON lines to a token cache on disk. The baselines tokenize texts in memory, with one
  call for all texts and with one call for each text. The corpus is the bundled Shakespeare, several
  times, in documents of three sizes.

`--stream` measures the time to the first batch of a stream, at the start and after that many
samples. Both require one window. The corpus has two files of 800 MB of JSON lines, plain and
compressed with gzip.

`--checks` measures the CPU time of a batch whose extents must be verified, as at the start of a
large corpus. The baseline is a batch with verified extents.

`--documents` measures the memory that a rank needs for that many documents. It also measures the
time to the first batch, at the start and far into the corpus. The corpus is a Megatron pair of
documents of 64 tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tiktoken
import torch

from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.config.sections_training import Data, DataSource, Training
from torchtitan_like.data.builder import DataBuilder
from torchtitan_like.data.text.documents import find_corpus
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import CacheFolders, entry_of
from torchtitan_like.data.tokens.tokenizing import cached_tokens

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "tests/assets/tokenizer"
SEQ_LEN, BATCH, NUM_BATCHES = 2048, 8, 200
TRAINING = Training(seq_len=SEQ_LEN, local_batch_size=BATCH)
DOCUMENTS = {"300 characters": 300, "3,000 characters": 3000, "8,000 characters": 8000}
Variant = Callable[[], int]  # returns the number of tokens


def measure(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of CPU time, by variant and round, after a warm-up round."""
    measure_rates: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name in random.Random(index).sample(sorted(variants), len(variants)):
            start = time.process_time()
            tokens = variants[name]()
            if index:
                measure_rates[name].append(tokens / (time.process_time() - start))
    return measure_rates


def reading_variants(corpus: Path, folder: Path) -> dict[str, Variant]:
    """Return the trainer's iterator and a bare loop over the same file."""
    batches = DataBuilder(
        Data(sources={"own": {"path": str(corpus)}}, cache_folder=str(folder)),
        tokenizer=load_tokenizer(ASSETS),
        dump_folder=str(folder),
    ).train_batches(TRAINING, seed=1, global_batch_size=BATCH)
    (file,) = folder.glob("*/tokens.bin")
    tokens = np.memmap(file, np.uint16, "r")
    generator = np.random.default_rng(1)

    def trainer() -> int:
        return sum(next(batches).tokens.numel() for _ in range(NUM_BATCHES))

    def bare_loop() -> int:
        count = 0
        for _ in range(NUM_BATCHES):
            starts = generator.integers(len(tokens) - SEQ_LEN, size=BATCH)
            rows = torch.from_numpy(
                np.stack([tokens[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
            )
            count += rows[:, :-1].contiguous().numel()
            rows[:, 1:].contiguous()
        return count

    return {"trainer": trainer, "bare_loop": bare_loop}


def measure_verification(folder: Path, copies: int, rounds: int) -> None:
    """Print CPU milliseconds of a batch with and without verification of its extents."""
    write_documents(folder / "text.jsonl", 3000, copies)
    batches = DataBuilder(
        Data(
            sources={"own": DataSource(path=str(folder / "text.jsonl"))},
            cache_folder=str(folder / "cache"),
        ),
        tokenizer=load_tokenizer(ASSETS),
        dump_folder=str(folder),
    ).train_batches(TRAINING, seed=1, global_batch_size=BATCH)
    tokens: Any = batches._batches._samples.parts[0].file.tokens
    verify, num_verified = tokens.file.verify, 0

    def verify_and_count(extent: int) -> None:
        nonlocal num_verified
        num_verified += 1
        verify(extent)

    tokens.file.verify = verify_and_count
    milliseconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds * NUM_BATCHES):
        is_first_read = number % 2 == 1
        verified = tokens.file._verified
        verified[:] = bytes([0 if is_first_read else 255]) * len(verified)
        start = time.thread_time()
        next(batches)
        milliseconds[is_first_read].append(1e3 * (time.thread_time() - start))
    median = {key: statistics.median(values) for key, values in milliseconds.items()}
    extents = num_verified / len(milliseconds[True])
    print("| batch | extents of 32 KiB | verified before, ms | first read, ms | verification, ms |")
    print("|---|---|---|---|---|")
    print(
        f"| {BATCH} x {SEQ_LEN:,} tokens | {extents:.1f} "
        f"| {median[False]:.3f} | {median[True]:.3f} | {median[True] - median[False]:.3f} |"
    )


def tokenizing_variants(
    corpus: Path, texts: list[str], tokenizer: Any, folder: Path
) -> dict[str, Variant]:
    """Return three variants: build a cache, tokenize in one call, tokenize in one call per text."""
    source, policy = (
        find_corpus(str(corpus)),
        TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id),
    )
    library = tokenizer._inner
    is_tiktoken = isinstance(library, tiktoken.Encoding)

    def trainer() -> int:
        shutil.rmtree(folder, ignore_errors=True)
        file = cached_tokens(
            source,
            policy,
            entry_of(source, "own", policy),
            CacheFolders(str(folder), str(folder)),
        )
        return file.meta.num_tokens - 2 * file.meta.num_documents

    def batch() -> int:
        if is_tiktoken:
            return sum(map(len, library.encode_ordinary_batch(texts, num_threads=1)))
        encodings = library.encode_batch(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encodings)

    def loop() -> int:
        if is_tiktoken:
            return sum(len(library.encode_ordinary(text)) for text in texts)
        return sum(len(library.encode(text, add_special_tokens=False).ids) for text in texts)

    return {"trainer": trainer, "batch": batch, "loop": loop}


def tokenizing_row(folder: str, file: str, characters: str, copies: str, rounds: str) -> None:
    """Print the result of `measure` for documents of this size. Runs in a new process."""
    tokenizer: Any = load_tokenizer(ASSETS / file)
    corpus = Path(folder, "text.jsonl")
    texts = write_documents(corpus, int(characters), int(copies))
    print(
        json.dumps(
            measure(
                tokenizing_variants(corpus, texts, tokenizer, Path(folder, "built")), int(rounds)
            )
        )
    )


def write_documents(file: Path, characters: int, copies: int) -> list[str]:
    """Write a corpus that is small enough to be tokenized without worker processes."""
    lines = DATASETS["shakespeare"].file.read_text(encoding="utf-8").splitlines() * copies
    plays = [json.loads(line)["text"] for line in lines]
    texts = [
        text[start : start + characters]
        for text in plays
        for start in range(0, len(text), characters)
    ]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def write_pair(prefix: Path, num_documents: int, length: int = 64) -> None:
    """Write Megatron's two files: documents with one sequence of `length` tokens each."""
    tokens = np.random.default_rng(1).integers(0, 2048, 2**20, "u2")
    with prefix.with_suffix(".bin").open("wb") as file:
        for first in range(0, num_documents * length, len(tokens)):
            file.write(tokens[: num_documents * length - first].tobytes())
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(
            struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_documents, num_documents + 1)
        )
        file.write(np.full(num_documents, length, "<i4").tobytes())
        file.write((np.arange(num_documents, dtype="<i8") * 2 * length).tobytes())
        file.write(np.arange(num_documents + 1, dtype="<i8").tobytes())


def first_batch(folder: str, position: str, packing: str) -> None:
    """Print the seconds until the first batch after `position`, and the MiB of memory.

    Runs in a new process.
    """
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.encode("warm-up")
    before, start = memory_mib(), time.perf_counter()
    batches = DataBuilder(
        Data(
            sources={"own": DataSource(path=folder, format="tokens")},
            packing=packing,  # type: ignore[arg-type]
            mask_document_starts=True,
        ),
        tokenizer=tokenizer,
        dump_folder=folder,
        with_positions=True,
    ).train_batches(TRAINING, seed=1, global_batch_size=BATCH)
    if int(position):
        counts = batches.order.counts_at(int(position))
        batches.load_state_dict(
            {**batches.state_dict(0), "position": int(position), "counts": counts}
        )
    next(batches)
    seconds = time.perf_counter() - start
    for _ in range(NUM_BATCHES):
        next(batches)
    print(
        json.dumps(
            {
                "seconds": seconds,
                **{name: size - before[name] for name, size in memory_mib().items()},
            }
        )
    )


def memory_mib() -> dict[str, float]:
    """Return the private memory of this process and its file pages, in MiB.

    The ranks of a machine share file pages, and the system can reclaim them.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {"own": status["RssAnon"], "files": status["RssFile"]}
    return {name: int(size.split()[0]) / 2**10 for name, size in sizes.items()}


def measure_scale(folder: Path, num_documents: int) -> None:
    """Print the time to the first batch, and its memory in addition to tokenizer and torch."""
    write_pair(folder / "a", num_documents)
    print(
        f"\n| {num_documents:,} documents | position | first batch, s "
        "| private memory, MiB | file pages, MiB |"
    )
    print("|---|---|---|---|---|")
    for packing in ("concat", "best_fit"):
        for position in (0, 0, 10**7, 10**7):  # the first run plans the samples
            figures = run_in_process("first_batch", str(folder), str(position), packing)
            cells = [
                f"{figures['seconds']:.3f}",
                f"{figures['own']:.1f}",
                f"{figures['files']:.1f}",
            ]
            print("| " + " | ".join([packing, f"{position:,}", *cells]) + " |", flush=True)


def write_stream(folder: Path, compressed: bool) -> None:
    """Write two files of 800 MB, the size of a C4 shard, with lines of the bundled corpus."""
    lines = [
        json.loads(line)["text"]
        for line in DATASETS["shakespeare"].file.read_text(encoding="utf-8").splitlines()
    ]
    verses = "\n".join(lines).splitlines()
    draw = np.random.default_rng(1)
    documents = [
        " ".join(verses[verse] for verse in draw.integers(len(verses), size=50))
        for _ in range(2**14)
    ]
    chunk = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    for number in range(2):
        name = folder / f"{number}.jsonl{'.gz' * compressed}"
        with gzip.open(name, "wb", compresslevel=1) if compressed else name.open("wb") as file:
            for _ in range(800_000_000 // len(chunk)):
                file.write(chunk)


def mock_hub(folder: Path) -> str:
    """Return a path on the Hub, whose downloads copy files from `folder` in this process."""
    import huggingface_hub
    from huggingface_hub import constants

    files = {f"text/{file.name}": file for file in folder.glob("*.gz")}

    def download(_: str, name: str, *, local_dir: Path, **__: object) -> str:
        (local_dir / "text").mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(files[name], local_dir / name))

    tree = [SimpleNamespace(path=name, size=file.stat().st_size) for name, file in files.items()]
    api = SimpleNamespace(
        dataset_info=lambda *_, **__: SimpleNamespace(sha="c0ffee"),
        list_repo_tree=lambda *_, **__: tree,
    )
    huggingface_hub.HfApi = lambda: api  # type: ignore[assignment,misc]
    huggingface_hub.hf_hub_download = download  # type: ignore[assignment]
    constants.HF_HUB_OFFLINE = False
    return "hf://datasets/own/text@v1/text/*.gz"


def stream_start(folder: str, position: str, on_hub: str) -> None:
    """Print wall seconds and CPU seconds until a stream's first batch after `position`.

    Runs in a new process.
    """
    path = mock_hub(Path(folder)) if on_hub else folder
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.encode("warm-up")
    cache = Path(folder, "cache")
    shutil.rmtree(cache, ignore_errors=True)
    start, cpu = time.perf_counter(), time.process_time()
    batches = DataBuilder(
        Data(sources={"own": DataSource(path=path, streaming=True)}, cache_folder=str(cache)),
        tokenizer=tokenizer,
        dump_folder=folder,
    ).train_batches(TRAINING, seed=1, global_batch_size=BATCH)
    window = int(position) // 6000  # windows have up to 6,000 samples
    state = {
        "position": int(position),
        "counts": {"own": int(position)},
        "cursors": {"own": (window, int(position))},
    }
    batches.load_state_dict({**batches.state_dict(0), **state})
    next(batches)
    print(
        json.dumps({"clock": time.perf_counter() - start, "CPU": time.process_time() - cpu}),
        flush=True,
    )
    os._exit(0)  # does not wait for prefetched windows


def measure_streams(folder: Path, position: int, rounds: int) -> None:
    """Print the seconds to the first batch, the minimum of `rounds`."""
    print("| stream | position | first batch, s | CPU time, s |\n|---|---|---|---|")
    for name in ("plain", "gzip", "gzip, on the Hub"):
        corpus = folder / name.partition(",")[0]
        if not corpus.exists():
            corpus.mkdir()
            write_stream(corpus, name == "gzip")
        on_hub = "on" * name.endswith("Hub")
        for start in (0, position):
            timings = [
                run_in_process("stream_start", str(corpus), str(start), on_hub)
                for _ in range(rounds)
            ]
            best = (f"{min(timing[kind] for timing in timings):.2f}" for kind in ("clock", "CPU"))
            print(f"| {name} | {start:,} | {' | '.join(best)} |", flush=True)


def run_in_process(function: str, *arguments: str) -> dict[str, Any]:
    """Run a function of this file in a new process and return the JSON that it prints."""
    code = f"import sys; from benchmarks import data; data.{function}(*sys.argv[1:])"
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def row(label: str, rates_by_variant: dict[str, list[float]], others: tuple[str, ...]) -> str:
    ratios = [
        spread(
            [
                rate / other
                for rate, other in zip(
                    rates_by_variant["trainer"], rates_by_variant[name], strict=True
                )
            ]
        )
        + f", best {max(rates_by_variant['trainer']) / max(rates_by_variant[name]):.2f}"
        for name in others
    ]
    measure_rates = [
        f"{statistics.median(rates_by_variant[name]) / 1e6:.2f}" for name in ("trainer", *others)
    ]
    return "| " + " | ".join([label, *measure_rates, *ratios]) + " |"


def spread(values: list[float]) -> str:
    """Format as median (minimum-maximum)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def measure_rates(folder: Path, arguments: argparse.Namespace) -> None:
    """Print the tables of tokens per second."""
    write_documents(folder / "text.jsonl", 3000, arguments.copies)
    rates = measure(reading_variants(folder / "text.jsonl", folder / "cache"), arguments.rounds)
    print("| reading | trainer | bare loop | ratio |\n|---|---|---|---|")
    print(row(f"{BATCH} x {SEQ_LEN:,} tokens", rates, ("bare_loop",)))
    print(
        "\n| tokenizing | trainer | batch | loop | trainer / batch | trainer / loop |\n"
        "|---|---|---|---|---|---|"
    )
    for kind, file in (("tokenizer.json", "tokenizer.json"), ("tiktoken file", "tokenizer.model")):
        for size, characters in DOCUMENTS.items():
            words = [file, str(characters), str(arguments.copies), str(arguments.rounds)]
            rates = run_in_process("tokenizing_row", str(folder), *words)
            print(row(f"{kind}, {size}", rates, ("batch", "loop")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="interleaved rounds, after a warm-up round"
    )
    parser.add_argument(
        "--copies", type=int, default=6, help="copies of the corpus, which has 2.4 MB"
    )
    parser.add_argument(
        "--documents", type=int, help="measure memory and start-up with this many documents instead"
    )
    parser.add_argument(
        "--stream", type=int, help="measure the start-up of a stream at this position instead"
    )
    parser.add_argument("--checks", action="store_true", help="measure the verification instead")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read at each call
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"medians of {arguments.rounds} rounds; M tokens per second of CPU time\n"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.checks:
            measure_verification(folder, arguments.copies, arguments.rounds)
        elif arguments.stream:
            measure_streams(folder, arguments.stream, arguments.rounds)
        elif arguments.documents:
            measure_scale(folder, arguments.documents)
        else:
            measure_rates(folder, arguments)


if __name__ == "__main__":
    main()
