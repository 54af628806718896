"""A headless Chromium for tests and benchmarks of the report; None where the machine has none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def missing() -> str:
    """Why the report cannot be opened here; empty where it can."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed; on Debian: apt-get install chromium chromium-driver"
    return ""


@contextlib.contextmanager
def browser(profile: str, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A Chromium of its own with a fresh profile folder, closed at the end."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()
