"""Pages of `titan run watch --web` in Chromium, while runs are written, killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.browser import (
    BROWSER_MARKS,
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
    step_row,
    write_killed_run,
    write_rows,
    write_steady_run,
)
from torchtitan_like.report.web.server import WatchServer

pytestmark = BROWSER_MARKS
STEPS = """
const figure = window.Bokeh?.documents[0]?.roots()[0];
const source = figure?.renderers.find((one) => one.data_source.tags[0] === "0/loss")?.data_source;
return source ? [...source.get_array("step")] : [];
"""
STATUS = "return document.getElementById('status').innerText"


class Site:
    """A server of the runs in a folder, and a browser that is logged in."""

    def __init__(self, browser: Any, folder: Path, cache: Path, artifacts: Path) -> None:
        self.browser = browser
        self.folder = folder
        self.artifacts = artifacts
        self._cache = cache
        self.start(port=0)
        browser.get_log("browser")  # discard messages of the previous page
        browser.get(self.server.url())
        self.wait_for(lambda: "Runs in" in self.text(), "the list")

    def start(self, port: int) -> None:
        self.server = WatchServer(
            self.folder, self._cache, host="127.0.0.1", port=port, token="token"
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def open(self, path: str) -> None:
        self.browser.get(f"http://127.0.0.1:{self.server.access.port}{path}")
        self.wait_for(
            lambda: (
                not self.run("return document.querySelector('.charts')")
                or self.run("return document.documentElement.dataset.ready") == "true"
            ),
            "the curves",
        )

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def wait_for(self, is_true: Callable[[], Any], what: str, timeout: float = 120) -> float:
        """Wait until a condition holds. Return the seconds."""
        from selenium.webdriver.support.ui import WebDriverWait

        start = time.monotonic()
        WebDriverWait(self.browser, timeout, poll_frequency=0.05).until(lambda _: is_true(), what)
        return time.monotonic() - start

    def screenshot(self, name: str) -> Path:
        return save_screenshot(self.browser, self.artifacts / f"live-{name}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from start_browser()


@pytest.fixture
def open_site(browser: Any, tmp_path: Path) -> Iterator[Callable[[Path], Site]]:
    sites: list[Site] = []

    def open_folder(folder: Path) -> Site:
        sites.append(Site(browser, folder, tmp_path / "cache", artifact_folder(tmp_path)))
        return sites[-1]

    yield open_folder
    for site in sites:
        site.stop()


def append_row(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(step, 1010.0 + 2 * step)) + "\n")


def test_a_new_row_is_shown_within_two_seconds(
    open_site: Callable[[Path], Site], tmp_path: Path
) -> None:
    run = write_steady_run(tmp_path / "runs/run")
    site = open_site(tmp_path / "runs")
    site.open("/run/run")
    delays = []
    for step in range(21, 31):
        append_row(run, step)
        delays.append(site.wait_for(lambda n=step: n in site.run(STEPS), f"step {step}"))
    assert statistics.median(delays) < 2, delays
    assert site.run(STEPS) == list(range(1, 31))
    site.wait_for(lambda: "step 30" in site.run(STATUS), "the status")
    assert site.run("return document.getElementById('cursor').max") == "30"
    color_at = read_colors(site.screenshot("new-rows"))
    assert color_at(2, 2)
    assert console_errors(site.browser) == []


def test_the_page_survives_restarts(open_site: Callable[[Path], Site], tmp_path: Path) -> None:
    """Of the run, which discards rows; of the server; and of the page."""
    run = write_steady_run(tmp_path / "runs/run")
    site = open_site(tmp_path / "runs")
    site.open("/run/run")
    write_rows(run / "new", [step_row(n, 2000.0 + n) for n in range(1, 11)])
    (run / "new").replace(run / "metrics.jsonl")
    site.wait_for(lambda: site.run(STEPS) == list(range(1, 11)), "the rows after the resume")
    append_row(run, 11)
    site.wait_for(lambda: 11 in site.run(STEPS), "a row of the new attempt")

    port = site.server.access.port
    site.stop()
    site.wait_for(
        lambda: site.run("return !document.getElementById('connection').hidden"), "the notice"
    )
    append_row(run, 12)
    site.start(port)
    site.wait_for(lambda: 12 in site.run(STEPS), "a row after the server's restart")
    assert site.run("return document.getElementById('connection').hidden")

    site.browser.refresh()
    append_row(run, 13)
    site.wait_for(lambda: site.run(STEPS) == list(range(1, 14)), "a row after a reload")
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("spike", 2012.0, step=12)) + "\n")
    kinds = "return [...document.querySelectorAll('[data-event]')].map((one) => one.dataset.event)"
    site.wait_for(lambda: "spike" in site.run(kinds), "a new kind of event")
    site.screenshot("restarts")


def test_the_buttons_write_switch_files(open_site: Callable[[Path], Site], tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    run = write_steady_run(tmp_path / "runs/run")
    (run / "config.toml").write_text("[checkpoint]\nenable = true\n")
    site = open_site(tmp_path / "runs")
    site.open("/run/run")
    answer = "return document.getElementById('answer').innerText"
    for action, name in (("save", "SAVE"), ("export", "EXPORT"), ("stop", "KILL")):
        site.browser.find_element(By.CSS_SELECTOR, f"[data-switch={action}]").click()
        if action == "stop":
            assert not (run / name).exists(), "the page asks first"
            site.browser.switch_to.alert.accept()
        site.wait_for(lambda text=f"{run / name} is created": text in site.run(answer), action)
        assert (run / name).exists()
    site.screenshot("buttons")
    assert console_errors(site.browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_pages_fit_the_screen(
    open_site: Callable[[Path], Site], tmp_path: Path, device: str, scheme: str
) -> None:
    write_steady_run(tmp_path / "runs/steady", 200)
    write_killed_run(tmp_path / "runs/a-group/killed")
    site = open_site(tmp_path / "runs")
    with emulated_device(site.browser, device, scheme) as width:
        for name, path in (("list", "/"), ("run", "/run/a-group%2Fkilled")):
            site.open(path)
            if name == "list":
                site.run("document.querySelector('a').focus()")
                site.wait_for(
                    lambda: site.run("return document.querySelectorAll('polyline').length"),
                    "the sparkline of an indexed run",
                )
                assert site.run("return document.activeElement.tagName") == "A"
            color_at = read_colors(site.screenshot(f"{name}-{device}-{scheme}"))
            assert (sum(color_at(2, 2)) < 200) == (scheme == "dark")
            assert site.run("return document.documentElement.scrollWidth") <= width
    assert console_errors(site.browser) == []


def test_scripts_in_a_live_run_are_not_executed(
    open_site: Callable[[Path], Site], tmp_path: Path
) -> None:
    name = "<img src=x onerror=document.title='attacked'>"
    run = write_killed_run(tmp_path / "runs" / name)
    (run / "exit.json").unlink()
    site = open_site(tmp_path / "runs")
    assert name in site.text()
    site.run("document.querySelector('td a').click()")
    site.wait_for(lambda: "Curves" in site.text(), "the page of the run")
    write_rows(run / "exit.json", [{"reason": f"{SCRIPT}{name}", "code": 1, "step": 8}])
    site.wait_for(lambda: f"{SCRIPT}{name}" in site.run(STATUS), "the reason")
    assert site.run("return document.title") == name
    assert console_errors(site.browser) == []


def test_a_killed_rank_is_shown_with_the_reason(
    open_site: Callable[[Path], Site], tmp_path: Path
) -> None:
    run = tmp_path / "runs/run"
    settings = {
        "job.dump_folder": run,
        "training.steps": 100_000,
        "metrics.log_freq": 1,
        "validation.enable": "false",
        "data.cache_folder": tmp_path / "tokens",
        "model.args.dim": 32,
        "model.args.n_layers": 2,
        "model.args.n_heads": 4,
        "training.seq_len": 32,
    }
    command = [sys.executable, "-m", "torchtitan_like", "train", "--nproc", "2"]
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    try:
        heartbeat = run / "attempts/1/heartbeat/rank-1.json"
        while not ((run / "metrics.jsonl").exists() and heartbeat.exists()):
            assert process.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
            time.sleep(0.1)
        site = open_site(tmp_path / "runs")
        site.open("/run/run")
        site.wait_for(lambda: "running" in site.run(STATUS), "the state")
        num_shown = len(site.run(STEPS))
        site.wait_for(lambda: len(site.run(STEPS)) > num_shown, "new steps")
        os.kill(json.loads(heartbeat.read_text())["pid"], signal.SIGKILL)
        assert process.wait(300) != 0
        site.wait_for(lambda: "stopped" in site.run(STATUS), "the end")
        assert "no error of rank 1: killed, or it hung" in site.run(STATUS)
        site.screenshot("killed-rank")
        site.wait_for(lambda: "Last error" in site.text(), "the error of the other rank")
        site.open("/")
        assert "no error of rank 1" in site.text()
        site.screenshot("killed-rank-list")
    finally:
        process.kill()
        process.wait()
