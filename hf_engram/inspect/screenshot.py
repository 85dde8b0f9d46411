"""A picture of a page, taken by a Chromium browser without a window."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
TIMEOUT = 120  # seconds


def find_browser() -> str:
    """Path of a Chromium browser.

    Raises:
        FileNotFoundError: there is none on the PATH.
    """
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(
        f"A screenshot needs a Chromium browser, and none of {', '.join(BROWSERS)} is on the PATH: install one "
        "(Debian and Ubuntu: apt install chromium)."
    )


def take_screenshot(page: Path, picture: Path, fragment: str = "", width: int = 1280, height: int = 800) -> None:
    """Writes a PNG of a page as a browser shows it.

    Args:
        page, picture: paths of the HTML file and of the PNG.
        fragment: what follows `#` in the page's address: which token and layer it shows.
        width, height: of the window, in pixels.

    Raises:
        FileNotFoundError: there is no browser. RuntimeError: it wrote no picture.
    """
    browser = find_browser()
    # A profile of its own: the reader's stays as it is, and may be in use.
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                   f"--window-size={width},{height}", f"--screenshot={picture.resolve()}"]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # which Chromium does not have for root
        command.append(f"{page.resolve().as_uri()}#{fragment}")
        before = picture.stat().st_mtime_ns if picture.exists() else None
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode or not picture.exists() or picture.stat().st_mtime_ns == before:
        raise RuntimeError(f"{browser} took no screenshot of {page} (exit {done.returncode}):\n{done.stderr[-2000:]}")
