"""Read batches and tokenize text, compared with the least that either can cost.

    python -m benchmarks.data [--rounds 9] [--copies 6] [--folder DIR]
    python -m benchmarks.data --documents 10_000_000
    python -m benchmarks.data --stream 10_000_000
    python -m benchmarks.data --checks

Each row runs in a new process with one thread. Each round times every side once, in another order,
so that noise of the machine affects all sides alike. The table gives tokens per second of CPU time:
medians over the rounds, of the rates and of the ratios within a round. The last column is the ratio
of the best rounds, which noise has affected least.

- reading: shuffled training batches of 8 samples of 2,048 tokens, with the digest of each step.
  Compared with a loop that reads random samples of a memory-mapped file into two int64 tensors.
- tokenizing: JSON lines to a token cache on disk. Compared with one call of the tokenizer for many
  texts in memory, and with one call for each text. The text is the shipped Shakespeare, several
  times, in documents of three sizes.

`--stream` measures the time to the first batch of a streamed text, at the start and after that many
samples. Either way, one window has to be built. The text is two files of 800 MB of JSON lines, plain
and compressed with gzip.

`--checks` measures the CPU time of a batch whose extents are all verified when they are read, as at
the start of a large corpus. Compared with a batch whose extents are verified already.

`--documents` measures the memory that so many documents take on a rank, and the time to the first
batch, at the start and far into the corpus. The corpus is a Megatron pair of documents of 64 tokens.
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
import torch

from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.config.sections_training import Data, DataSource, Training
from torchtitan_like.data.build import build_train_batches
from torchtitan_like.data.text.documents import find_corpus
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import cached_tokens, entry_of

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "tests/assets/tokenizer"
SEQ_LEN, BATCH, NUM_BATCHES = 2048, 8, 200
DOCUMENTS = {"300 characters": 300, "3,000 characters": 3000, "8,000 characters": 8000}
Side = Callable[[], int]  # returns tokens


def measure(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of CPU time of each side in each round, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds + 1):
        for name in random.Random(index).sample(sorted(sides), len(sides)):
            begin = time.process_time()
            tokens = sides[name]()
            if index:
                found[name].append(tokens / (time.process_time() - begin))
    return found


def reading(corpus: Path, folder: Path) -> dict[str, Side]:
    """Batches of the trainer's own iterator, and of a bare loop over the same file."""
    batches = build_train_batches(
        Training(seq_len=SEQ_LEN, local_batch_size=BATCH),
        Data(sources={"own": {"path": str(corpus)}}, cache_folder=str(folder)),
        tokenizer=load_tokenizer(ASSETS), dump_folder=str(folder), seed=1, dp_rank=0, dp_size=1, num_accumulation=1,
    )  # fmt: skip
    (file,) = folder.glob("*/tokens.bin")
    tokens = np.memmap(file, np.uint16, "r")
    generator = np.random.default_rng(1)

    def ours() -> int:
        return sum(next(batches).tokens.numel() for _ in range(NUM_BATCHES))

    def bare() -> int:
        count = 0
        for _ in range(NUM_BATCHES):
            starts = generator.integers(len(tokens) - SEQ_LEN, size=BATCH)
            rows = torch.from_numpy(
                np.stack([tokens[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
            )
            count += rows[:, :-1].contiguous().numel()
            rows[:, 1:].contiguous()
        return count

    return {"ours": ours, "bare": bare}


def checks(folder: Path, copies: int, rounds: int) -> None:
    """Print CPU milliseconds of a batch with and without the verification of what it reads."""
    write_documents(folder / "text.jsonl", 3000, copies)
    batches = build_train_batches(
        Training(seq_len=SEQ_LEN, local_batch_size=BATCH),
        Data(
            sources={"own": DataSource(path=str(folder / "text.jsonl"))},
            cache_folder=str(folder / "cache"),
        ),
        tokenizer=load_tokenizer(ASSETS),
        dump_folder=str(folder),
        seed=1,
        dp_rank=0,
        dp_size=1,
        num_accumulation=1,
    )
    tokens: Any = batches._batches._samples.parts[0].file.tokens
    verify, num_verified = tokens.file.verify, 0

    def counted(extent: int) -> None:
        nonlocal num_verified
        num_verified += 1
        verify(extent)

    tokens.file.verify = counted
    milliseconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds * NUM_BATCHES):
        is_first_read = number % 2 == 1
        verified = tokens.file._verified
        verified[:] = bytes([0 if is_first_read else 255]) * len(verified)
        begin = time.thread_time()
        next(batches)
        milliseconds[is_first_read].append(1e3 * (time.thread_time() - begin))
    median = {key: statistics.median(values) for key, values in milliseconds.items()}
    extents = num_verified / len(milliseconds[True])
    print("| batch | extents of 32 KiB | verified before, ms | first read, ms | verification, ms |")
    print("|---|---|---|---|---|")
    print(
        f"| {BATCH} x {SEQ_LEN:,} tokens | {extents:.1f} | {median[False]:.3f} | {median[True]:.3f} "
        f"| {median[True] - median[False]:.3f} |"
    )


def tokenizing(corpus: Path, texts: list[str], tokenizer: Any, folder: Path) -> dict[str, Side]:
    """A cache built in this process; the engine's own batch; its call for one text."""
    source, policy = find_corpus(str(corpus)), TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
    fast = getattr(tokenizer, "_fast", tokenizer._inner)
    engine = tokenizer._inner if fast is None else getattr(fast, "_engine", fast)

    def ours() -> int:
        shutil.rmtree(folder, ignore_errors=True)
        file = cached_tokens(source, policy, entry_of(source, "own", policy), cache_folder=str(folder), dump_folder=str(folder))
        return file.meta.num_tokens - 2 * file.meta.num_documents

    def batch() -> int:
        if fast is None:
            return sum(len(encoding.ids) for encoding in engine.encode_batch(texts, add_special_tokens=False))
        return sum(map(len, engine.encode_ordinary_batch(texts, num_threads=1)))

    def loop() -> int:
        if fast is None:
            return sum(len(engine.encode(text, add_special_tokens=False).ids) for text in texts)
        return sum(len(engine.encode_ordinary(text)) for text in texts)

    return {"ours": ours, "batch": batch, "loop": loop}


def tokenizing_row(folder: str, file: str, by_library: str, characters: str, copies: str, rounds: str) -> None:
    """Print the result of `measure` for documents of so many characters. Runs in a new process."""
    tokenizer: Any = load_tokenizer(ASSETS / file)
    if by_library:
        tokenizer._fast = None
    corpus = Path(folder, "text.jsonl")
    texts = write_documents(corpus, int(characters), int(copies))
    print(json.dumps(measure(tokenizing(corpus, texts, tokenizer, Path(folder, "built")), int(rounds))))


def write_documents(file: Path, characters: int, copies: int) -> list[str]:
    """Few enough that no worker processes are started."""
    lines = DATASETS["shakespeare"].file.read_text(encoding="utf-8").splitlines() * copies
    whole = [json.loads(line)["text"] for line in lines]
    texts = [text[start : start + characters] for text in whole for start in range(0, len(text), characters)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def write_pair(prefix: Path, num_documents: int, length: int = 64) -> None:
    """Megatron's two files: documents of one sequence each, of ``length`` tokens."""
    tokens = np.random.default_rng(1).integers(0, 2048, 2**20, "u2")
    with prefix.with_suffix(".bin").open("wb") as file:
        for first in range(0, num_documents * length, len(tokens)):
            file.write(tokens[: num_documents * length - first].tobytes())
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_documents, num_documents + 1))
        file.write(np.full(num_documents, length, "<i4").tobytes())
        file.write((np.arange(num_documents, dtype="<i8") * 2 * length).tobytes())
        file.write(np.arange(num_documents + 1, dtype="<i8").tobytes())


def first_batch(folder: str, position: str, packing: str) -> None:
    """Print the seconds until the first batch after `position`, and MiB (see `scale`). Runs in a new process."""
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.encode("as any run does")
    before, begin = memory_mib(), time.perf_counter()
    batches = build_train_batches(
        Training(seq_len=SEQ_LEN, local_batch_size=BATCH),
        Data(sources={"own": DataSource(path=folder, format="tokens")}, packing=packing, mask_document_starts=True),  # type: ignore[arg-type]
        tokenizer=tokenizer, dump_folder=folder, seed=1, dp_rank=0, dp_size=1, num_accumulation=1, with_positions=True,
    )  # fmt: skip
    if int(position):
        counts = batches.order.counts_at(int(position))
        batches.load_state_dict({**batches.state_dict(0), "position": int(position), "counts": counts})
    next(batches)
    seconds = time.perf_counter() - begin
    for _ in range(NUM_BATCHES):
        next(batches)
    print(json.dumps({"seconds": seconds, **{name: size - before[name] for name, size in memory_mib().items()}}))


def memory_mib() -> dict[str, float]:
    """MiB of this process: its own, and pages of files, which the ranks of a machine share and the system takes back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {"own": status["RssAnon"], "files": status["RssFile"]}
    return {name: int(size.split()[0]) / 2**10 for name, size in sizes.items()}


def scale(folder: Path, num_documents: int) -> None:
    """Print the time to the first batch, and the memory above a process with only tokenizer and torch."""
    write_pair(folder / "a", num_documents)
    print(f"\n| {num_documents:,} documents | position | first batch, s | own memory, MiB | pages of files, MiB |")
    print("|---|---|---|---|---|")
    for packing in ("concat", "best_fit"):
        for position in (0, 0, 10**7, 10**7):  # the first one plans
            found = in_a_process("first_batch", str(folder), str(position), packing)
            cells = [f"{found['seconds']:.3f}", f"{found['own']:.1f}", f"{found['files']:.1f}"]
            print("| " + " | ".join([packing, f"{position:,}", *cells]) + " |", flush=True)


def write_stream(folder: Path, compressed: bool) -> None:
    """Two files of 800 MB of JSON lines, a shard of C4: the shipped text, its lines in another order in each document."""
    lines = [json.loads(line)["text"] for line in DATASETS["shakespeare"].file.read_text(encoding="utf-8").splitlines()]
    verses = "\n".join(lines).splitlines()
    draw = np.random.default_rng(1)
    documents = [" ".join(verses[verse] for verse in draw.integers(len(verses), size=50)) for _ in range(2**14)]
    chunk = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    for number in range(2):
        name = folder / f"{number}.jsonl{'.gz' * compressed}"
        with gzip.open(name, "wb", compresslevel=1) if compressed else name.open("wb") as file:
            for _ in range(800_000_000 // len(chunk)):
                file.write(chunk)


def be_the_hub(folder: Path) -> str:
    """Return a path of the Hub. In this process, its files are copied from `folder` at the speed of the disk."""
    import huggingface_hub
    from huggingface_hub import constants

    files = {f"text/{file.name}": file for file in folder.glob("*.gz")}

    def download(_: str, name: str, *, local_dir: Path, **__: object) -> str:
        (local_dir / "text").mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(files[name], local_dir / name))

    tree = [SimpleNamespace(path=name, size=file.stat().st_size) for name, file in files.items()]
    api = SimpleNamespace(
        dataset_info=lambda *_, **__: SimpleNamespace(sha="c0ffee"), list_repo_tree=lambda *_, **__: tree
    )
    huggingface_hub.HfApi, huggingface_hub.hf_hub_download = lambda: api, download  # type: ignore[assignment,misc]
    constants.HF_HUB_OFFLINE = False
    return "hf://datasets/own/text@v1/text/*.gz"


def stream_start(folder: str, position: str, on_hub: str) -> None:
    """Print the seconds, of the clock and of CPU time, until a stream's first batch after `position`.

    Runs in a new process.
    """
    path = be_the_hub(Path(folder)) if on_hub else folder
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.encode("as any run does")
    cache = Path(folder, "cache")
    shutil.rmtree(cache, ignore_errors=True)
    begin, cpu = time.perf_counter(), time.process_time()
    batches = build_train_batches(
        Training(seq_len=SEQ_LEN, local_batch_size=BATCH),
        Data(sources={"own": DataSource(path=path, streaming=True)}, cache_folder=str(cache)),
        tokenizer=tokenizer, dump_folder=folder, seed=1, dp_rank=0, dp_size=1, num_accumulation=1,
    )  # fmt: skip
    window = int(position) // 6000  # of so many samples or fewer: it is the number of the window that counts
    state = {"position": int(position), "counts": {"own": int(position)}, "cursors": {"own": (window, int(position))}}
    batches.load_state_dict({**batches.state_dict(0), **state})
    next(batches)
    print(json.dumps({"clock": time.perf_counter() - begin, "CPU": time.process_time() - cpu}), flush=True)
    os._exit(0)  # without waiting for the windows made ahead


def streams(folder: Path, position: int, rounds: int) -> None:
    """Seconds to the first batch, the best of ``rounds``."""
    print("| stream | position | first batch, s | CPU time, s |\n|---|---|---|---|")
    for name in ("plain", "gzip", "gzip, on the Hub"):
        place = folder / name.partition(",")[0]
        if not place.exists():
            place.mkdir()
            write_stream(place, name == "gzip")
        on_hub = "on" * name.endswith("Hub")
        for begin in (0, position):
            found = [in_a_process("stream_start", str(place), str(begin), on_hub) for _ in range(rounds)]
            best = (f"{min(one[kind] for one in found):.2f}" for kind in ("clock", "CPU"))
            print(f"| {name} | {begin:,} | {' | '.join(best)} |", flush=True)


def in_a_process(function: str, *arguments: str) -> dict[str, Any]:
    """What a function of this file prints."""
    code = f"import sys; from benchmarks import data; data.{function}(*sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def row(label: str, found: dict[str, list[float]], others: tuple[str, ...]) -> str:
    ratios = [
        spread([ours / other for ours, other in zip(found["ours"], found[name], strict=True)])
        + f", best {max(found['ours']) / max(found[name]):.2f}"
        for name in others
    ]
    rates = [f"{statistics.median(found[name]) / 1e6:.2f}" for name in ("ours", *others)]
    return "| " + " | ".join([label, *rates, *ratios]) + " |"


def spread(values: list[float]) -> str:
    """Median (minimum-maximum)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def rates(folder: Path, arguments: argparse.Namespace) -> None:
    """Both tables of tokens per second."""
    write_documents(folder / "text.jsonl", 3000, arguments.copies)
    found = measure(reading(folder / "text.jsonl", folder / "cache"), arguments.rounds)
    print("| reading | ours | bare loop | ratio |\n|---|---|---|---|")
    print(row(f"{BATCH} x {SEQ_LEN:,} tokens", found, ("bare",)))
    print("\n| tokenizing | ours | batch | loop | ours / batch | ours / loop |\n|---|---|---|---|---|---|")
    for engine, file in (("tokenizer.json", "tokenizer.json"), ("tiktoken file", "tokenizer.model"),
                         ("tokenizer.json, `tokenizers` library", "tokenizer.json")):  # fmt: skip
        by_library = "yes" * ("library" in engine)
        copies = max(1, arguments.copies // 6) if by_library else arguments.copies
        for size, characters in DOCUMENTS.items():
            words = [file, by_library, str(characters), str(copies), str(arguments.rounds)]
            found = in_a_process("tokenizing_row", str(folder), *words)
            print(row(f"{engine}, {size}", found, ("batch", "loop")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds, after one that is not counted")
    parser.add_argument("--copies", type=int, default=6, help="of the text, which has 2.4 MB")
    parser.add_argument("--documents", type=int, help="measure memory and starts with so many instead")
    parser.add_argument("--stream", type=int, help="measure the starts of a stream, up to this position, instead")
    parser.add_argument("--checks", action="store_true", help="measure the verification instead")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read at each call
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python "
          f"{platform.python_version()}, medians of {arguments.rounds} rounds; M tokens per second of CPU time\n")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.checks:
            checks(folder, arguments.copies, arguments.rounds)
        elif arguments.stream:
            streams(folder, arguments.stream, arguments.rounds)
        elif arguments.documents:
            scale(folder, arguments.documents)
        else:
            rates(folder, arguments)


if __name__ == "__main__":
    main()
