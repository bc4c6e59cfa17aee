"""`titan run report` of a metrics file of 3 GB: no row is lost, within a bound of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runner import ROOT
from tests.unit.report.run_folder import start_event, write_rows

NUM_BYTES = 3_000_000_000
ROWS_PER_WRITE = 10_000
SPIKE_STEP = 1_234_567
# A row of a dense model at a log step, padded to the length of a long one.
ROW = (
    b'{"step": %d, "n_tokens_seen": %d, "num_valid_tokens": 2048, "loss": %s, "max_loss": 3.6015625, '
    b'"grad_norm": 0.44814270734786987, "lr": 4.0000000000000003e-05, "data_digest": '
    b'"3f2a9c5be0d14477", "data_digest_chain": "b7e0d3a2c4f59168", "skipped": 0, "time": %d.125, '
    b'"data_loading_s": 0.0012, "step_s": 0.5, "tps": 4096.0, "tflops": 1.5, "mfu": 41.25, '
    b'"memory_gib": 61.5, "data_loading_percent": 0.25, "end_to_end_s": 0.51}\n'
)
# One row takes 19 numbers of 8 bytes in memory, and some copies while the page is made.
MAX_BYTES_PER_ROW = 600
CODE = (
    "import sys; from tests.harness.memory import peak_resident_bytes; "
    "from torchtitan_like.cli import main; code = main(sys.argv[1:]); "
    "print(peak_resident_bytes(), file=sys.stderr); sys.exit(code)"
)


def write_metrics(file: Path, num_bytes: int) -> int:
    """Write rows of at least `num_bytes`. Returns their number."""
    num_rows = 0
    file.parent.mkdir(parents=True)
    with file.open("wb") as output:
        while output.tell() < num_bytes:
            rows = []
            for step in range(num_rows + 1, num_rows + ROWS_PER_WRITE + 1):
                loss = b"99.5" if step == SPIKE_STEP else b"3.4655625820159912"
                rows.append(ROW % (step, 2048 * step, loss, 1_700_000_000 + step))
            output.write(b"".join(rows))
            num_rows += ROWS_PER_WRITE
    return num_rows


@pytest.mark.nightly
def test_a_metrics_file_of_3_gb_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    try:
        num_rows = write_metrics(metrics, NUM_BYTES)
        with metrics.open("ab") as output:
            output.write(ROW[:50])  # the run was killed while it wrote
        write_rows(run / "events.jsonl", [start_event(1, 1_700_000_000.0)])
        page = tmp_path / "page.html"
        done = subprocess.run(
            [sys.executable, "-c", CODE, "run", "report", str(run), "-o", str(page), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        (numbers,) = json.loads(done.stdout)["runs"]
        assert numbers["num_rows"] == numbers["step"] == num_rows
        assert numbers["tokens"] == 2048 * num_rows
        assert numbers["loss"]["max"] == {"value": 99.5, "step": SPIKE_STEP}
        (problem,) = numbers["problems"]
        assert problem.startswith(
            f"metrics.jsonl: skipped 1 of {num_rows + 1:,} lines (incomplete)"
        )
        assert page.stat().st_size <= 3_000_000
        bytes_per_row = int(done.stderr.split()[-1]) / num_rows
        assert bytes_per_row < MAX_BYTES_PER_ROW, f"{bytes_per_row:.0f} bytes of memory per row"
    finally:
        metrics.unlink(missing_ok=True)  # pytest keeps the folders of several runs
