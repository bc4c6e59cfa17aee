"""Pages of `titan run report` in Chromium: curves, events and rows are where the files say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.browser import (
    BROWSER_MARKS,
    PAINTED,
    WIDTHS,
    artifact_folder,
    console_errors,
    emulated_device,
    read_colors,
    save_screenshot,
    start_browser,
)
from tests.harness.runner import ROOT
from tests.unit.report.run_folder import (
    SCRIPT,
    event,
    start_event,
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)

pytestmark = BROWSER_MARKS
# The pixel of a row of a curve in the window. figure, curve: their numbers.
PIXEL_OF_ROW = """
const [number, name, step] = arguments;
const figure = Bokeh.documents[0].roots()[number];
const view = Bokeh.index.get(figure);
view.el.scrollIntoView({block: "center"});
const source = figure.renderers.find((one) => one.data_source.name === name).data_source;
const row = [...source.get_array("step")].indexOf(step);
const column = document.querySelector("input[name=x]:checked").value;
const box = view.canvas_view.el.getBoundingClientRect();
return [
  box.left + view.frame.x_scale.compute(source.get_array(column)[row]),
  box.top + view.frame.y_scale.compute(source.get_array("value")[row]),
];
"""


class Page:
    """A report in the browser."""

    def __init__(self, browser: Any, file: Path) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        self.browser = browser
        self.file = file
        browser.get(file.as_uri())
        WebDriverWait(browser, 60).until(
            lambda b: b.execute_script("return document.documentElement.dataset.ready") == "true"
        )

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def move_to(self, x: float, y: float) -> str:
        """Move the pointer; return the text of the tip."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.browser)
        for offset in (40, 0):
            chain.w3c_actions.pointer_action.move_to_location(int(x) + offset, int(y))
        chain.perform()
        self.browser.execute_async_script(PAINTED)
        return str(self.run("return document.querySelector('.tip').innerText"))

    def screenshot(self, name: str) -> Path:
        """Save what the window shows next to the page."""
        return save_screenshot(self.browser, self.file.with_name(f"{self.file.stem}-{name}.png"))

    def errors(self) -> list[str]:
        return console_errors(self.browser)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from start_browser()


@pytest.fixture
def open_report(browser: Any, tmp_path: Path) -> Callable[..., Page]:
    folder = artifact_folder(tmp_path)

    def open_page(name: str, *runs: Path) -> Page:
        page = folder / f"{name}.html"
        subprocess.run(
            [sys.executable, "-m", "torchtitan_like", "run", "report", *runs, "-o", page],
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        browser.get_log("browser")  # discard messages of the previous page
        return Page(browser, page)

    return open_page


def is_colored(color: tuple[int, int, int]) -> bool:
    return max(color) - min(color) > 40


def test_the_curve_is_painted_where_its_rows_are(
    open_report: Callable[..., Page], tmp_path: Path
) -> None:
    losses = [6.0 if step % 20 < 10 else 5.0 for step in range(1, 101)]
    rows = [step_row(n, 1000.0 + n, loss=loss) for n, loss in enumerate(losses, start=1)]
    write_rows(tmp_path / "run/metrics.jsonl", rows)
    page = open_report("curve", tmp_path / "run")
    for column in ("step", "tokens", "hours"):
        page.run(f"document.querySelector('input[value={column}]').click()")
        points = [page.run(PIXEL_OF_ROW, 0, "train", step) for step in (25, 35, 65, 75)]
        color_at = read_colors(page.screenshot(column))
        for x, y in points:
            assert any(is_colored(color_at(x, y + offset)) for offset in (-1, 0, 1)), column
            assert not is_colored(color_at(x, y + 12)), column
    assert page.errors() == []


def test_the_tip_shows_the_row_and_the_event(
    open_report: Callable[..., Page], tmp_path: Path
) -> None:
    page = open_report("killed", write_killed_run(tmp_path / "run"))
    page.run("document.querySelector('.controls').style.position = 'static'")
    text = page.move_to(*page.run(PIXEL_OF_ROW, 0, "train", 3))
    assert ["train", "7.97", "3", "192"] == text.splitlines()[1].split("\t")[:4]
    assert "save at step 3 (run): attempt 1" in text
    assert "resume on another layout at step 3" in text and "ranks 1 -> 2" in text
    assert "skipped step" not in text
    text = page.move_to(*page.run(PIXEL_OF_ROW, 0, "train", 7))
    assert ["train", "7.93", "7", "448"] == text.splitlines()[1].split("\t")[:4]
    assert "save" not in text
    assert page.errors() == []


def test_events_are_at_their_steps_and_can_be_hidden(
    open_report: Callable[..., Page], tmp_path: Path
) -> None:
    run = write_steady_run(tmp_path / "run", 100)
    spike = event("spike", 1090.0, step=40, quantity="loss", value=9.0, limit=8.5)
    write_rows(run / "events.jsonl", [start_event(1, 1000.0), spike])
    page = open_report("spike", run)
    x, _ = page.run(PIXEL_OF_ROW, 0, "train", 40)
    bottom = page.run(
        "const view = Bokeh.index.get(Bokeh.documents[0].roots()[0]);"
        "return view.canvas_view.el.getBoundingClientRect().top + view.frame.bbox.bottom"
    )

    def is_shown(name: str) -> bool:
        color_at = read_colors(page.screenshot(name))
        return any(is_colored(color_at(x, bottom - offset)) for offset in range(4, 12))

    assert is_shown("events")
    page.run("document.querySelector('input[data-event=spike]').click()")
    assert not is_shown("no-events")


def test_the_keyboard_reads_rows(open_report: Callable[..., Page], tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page = open_report("keyboard", write_steady_run(tmp_path / "run"))
    page.browser.find_element(By.ID, "cursor").send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 6)
    values = page.run("return document.querySelector('#values tbody').innerText").splitlines()
    assert "Loss: train\t7\t7.93" in values
    assert page.run("return document.activeElement.id") == "cursor"


def test_log_axes(open_report: Callable[..., Page], tmp_path: Path) -> None:
    page = open_report("log", write_steady_run(tmp_path / "run", 100))
    page.run("document.getElementById('log').click()")
    pixels = [page.run(PIXEL_OF_ROW, 1, "train", step)[0] for step in (1, 10, 100)]
    assert pixels[1] - pixels[0] == pytest.approx(pixels[2] - pixels[1], abs=1)
    color_at = read_colors(page.screenshot("axes"))
    x, y = page.run(PIXEL_OF_ROW, 1, "train", 10)
    assert any(is_colored(color_at(x, y + offset)) for offset in (-1, 0, 1))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_two_runs_fit_the_screen(
    open_report: Callable[..., Page], tmp_path: Path, device: str, scheme: str
) -> None:
    runs = [write_steady_run(tmp_path / "a"), write_killed_run(tmp_path / "b")]
    page = open_report(f"two-{device}-{scheme}", *runs)
    with emulated_device(page.browser, device, scheme) as width:
        color_at = read_colors(page.screenshot("top"))
        assert (sum(color_at(2, 2)) < 200) == (scheme == "dark")
        assert page.run("return document.documentElement.scrollWidth") <= width
        page.run("document.querySelector('.charts').scrollIntoView()")
        page.screenshot("curves")
        names = page.run(
            "return [...Bokeh.documents[0].roots()[0].renderers].map((one) => one.data_source.name)"
        )
        assert {"a: train", "b: train"} <= set(names)
        assert page.errors() == []


def test_scripts_in_a_run_are_not_executed(
    open_report: Callable[..., Page], tmp_path: Path
) -> None:
    run = write_killed_run(tmp_path / "run")
    write_rows(run / "eval.jsonl", [{SCRIPT: SCRIPT}])
    sources = {SCRIPT: {"loss": 5.0}, f"<img src=x onerror={json.dumps(SCRIPT)}>": {"loss": 4.0}}
    write_rows(run / "metrics.jsonl", [step_row(n, 200.0 + n, sources=sources) for n in (1, 2, 3)])
    write_rows(run / "events.jsonl", [event(SCRIPT, 201.0, step=2, detail=SCRIPT)])
    page = open_report("attack", run)
    text = page.move_to(*page.run(PIXEL_OF_ROW, 0, "train", 2))
    assert SCRIPT in text
    assert page.run("return document.title") == "run"
    assert page.errors() == []


def test_a_million_steps(open_report: Callable[..., Page], tmp_path: Path) -> None:
    rows = (step_row(n, 1000.0 + n, loss=3 + 1000 / n) for n in range(1, 1_000_001))
    write_rows(tmp_path / "run/metrics.jsonl", rows)
    page = open_report("million", tmp_path / "run")
    assert page.file.stat().st_size <= 3_000_000
    steps = page.run(
        "return [...Bokeh.documents[0].roots()[0].renderers[0].data_source.get_array('step')]"
    )
    assert steps[0] == 1 and steps[-1] == 1_000_000 and len(steps) > 1000
    assert page.errors() == []
