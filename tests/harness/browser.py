"""Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
# Marks of a module with such tests.
BROWSER_MARKS = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None, reason="needs chromium and chromedriver"
    ),
]
WIDTHS = {"desktop": 1300, "phone": 390}
# The page and its curves have been painted.
PAINTED = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => done()));
"""


def start_browser() -> Iterator[Any]:
    """Yield a driver of Chromium without a window, then end it."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        "--window-size=1300,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


@contextmanager
def emulated_device(browser: Any, device: str, scheme: str) -> Iterator[int]:
    """Show pages as a device of `WIDTHS` does, in a light or dark scheme. Yields its width."""
    width = WIDTHS[device]
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": device == "phone"},
    )
    try:
        yield width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def artifact_folder(default: Path) -> Path:
    """Return the folder of screenshots: $REPORT_SCREENSHOTS, or else `default`."""
    folder = Path(os.environ.get("REPORT_SCREENSHOTS", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_screenshot(browser: Any, path: Path) -> Path:
    """Save what the window shows, after it is painted."""
    browser.execute_async_script(PAINTED)
    browser.save_screenshot(str(path))
    return path


def console_errors(browser: Any) -> list[str]:
    """Return the errors in the console since the last call."""
    messages = browser.get_log("browser")
    return [one["message"] for one in messages if one["level"] in ("SEVERE", "ERROR")]


def read_colors(path: Path) -> Callable[[float, float], tuple[int, int, int]]:
    """Return a function from a pixel of a picture to its color."""
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.open(path).convert("RGB")
    return lambda x, y: image.getpixel((round(x), round(y)))
