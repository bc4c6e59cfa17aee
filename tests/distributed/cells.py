"""Parity cells of a model with experts: each layout is compared with one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.distributed.parity import Trace, options, run_cell
from tests.distributed.test_matrix import CP, OPTIONS, PP, TP, VALIDATE
from tests.harness.rank_pool import run_ranks

AC_OP = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
INDUCTOR = {"compile.enable": "true", "compile.backend": "inductor"}
CELL_OPTIONS = OPTIONS | {"op": AC_OP, "accumulation": {}, "inductor": INDUCTOR}
WITHOUT_ACCUMULATION = ("compile", "op")
SECONDS = {"inductor": 500}  # of the options that compile kernels; the others take at most 120


class Cells:
    """The layouts of one tiny model in float64.

    model: settings of the model. layouts: name -> (ranks, settings).
    absent: arguments of Llama 3 that the model does not have.
    """

    def __init__(
        self,
        model: Mapping[str, object],
        layouts: Mapping[str, tuple[int, dict[str, object]]],
        absent: Iterable[str] = ("multiple_of",),
    ) -> None:
        self.model = model
        self.layouts = layouts
        self.absent = absent
        self._references: dict[frozenset[tuple[str, object]], Trace] = {}

    def parameters(
        self, every_run: list[tuple[str, str]], excluded: Iterable[tuple[str, str]] = ()
    ) -> list[object]:
        """Return the cells of every run, then all others, for nightly runs."""
        others = [
            pytest.param(layout, option, marks=pytest.mark.nightly)
            for layout in self.layouts
            for option in ("together", "compile", "op")
            if (layout, option) not in (*every_run, *excluded)
            and not ("zbv" in layout and option != "together")
        ]
        return [*every_run, *others]

    def settings(self, folder: Path, **overrides: object) -> list[str]:
        """Return the arguments of a run."""
        argv = options(str(folder), "float64", **{**self.model, **overrides})
        for name in self.absent:
            index = argv.index(f"--model.args.{name}")
            argv = argv[:index] + argv[index + 2 :]
        return argv

    def reference(self, folder: Path, overrides: Mapping[str, object]) -> Trace:
        """Return the trace of one rank, which is the same for equal settings."""
        key = frozenset(overrides.items())
        if key not in self._references:
            path = folder / f"one-rank-{len(self._references)}"
            self._references[key] = run_ranks(run_cell, 1, self.settings(path, **overrides))[0]
        return self._references[key]

    def run(
        self, folder: Path, layout: str, option: str, changes: Mapping[str, object] | None = None
    ) -> tuple[Trace, Trace]:
        """Return the traces of one rank and of a layout, both with the same `changes`."""
        ranks, cell = self.layouts[layout]
        model = {key: value for key, value in cell.items() if key.startswith("model.args.")}
        model |= changes or {}
        expected = self.reference(folder, model | (VALIDATE if option == "together" else {}))
        data_ranks = ranks // (cell.get(TP, 1) * cell.get(PP, 1) * cell.get(CP, 1))
        local = 8 // data_ranks if option in WITHOUT_ACCUMULATION else min(2, 4 // data_ranks)
        argv = self.settings(
            folder / f"{layout}-{option}",
            **{**cell, **model, "training.local_batch_size": local, **CELL_OPTIONS[option]},
        )
        return expected, run_ranks(run_cell, ranks, argv, timeout=SECONDS.get(option, 120))[0]
