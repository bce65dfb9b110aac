"""The page of `doit report` in a real browser."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.pipeline.comparing_folders import a_sweep
from tests.pipeline.conftest import Printed
from tests.waiting import HANG_S


@pytest.mark.slow
def test_chromium_shows_the_page_at_every_width_and_asks_nobody(tmp_path: Path, reported: Printed) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here")
    a_sweep(tmp_path)
    reported(tmp_path)
    widths = (320, 768, 1200)
    frames = "".join(
        f'<iframe src="reports/sweep-tuned.html" width="{width}" height="600"></iframe>' for width in widths
    )
    script = (
        "onload = () => { document.title = [...document.querySelectorAll('iframe')].map(frame => { const page = "
        "frame.contentDocument; return [page.documentElement.scrollWidth <= frame.clientWidth, "
        "page.querySelectorAll('svg').length, page.scripts.length, [...page.querySelectorAll('*')].filter(item => "
        "item.scrollWidth > item.clientWidth && frame.contentWindow.getComputedStyle(item).overflowX === 'auto' && "
        "item.tabIndex < 0).length].join() }).join(' ') }"
    )
    (tmp_path / "all.html").write_text(
        f"<!DOCTYPE html><title></title><img src='http://probe.invalid/'>{frames}<script>{script}</script>"
    )
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=_take_down, args=(proxy, asked), daemon=True).start()
        done = subprocess.run(
            [
                chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
                "--disable-default-apps", f"--proxy-server=127.0.0.1:{proxy.getsockname()[1]}",
                f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/all.html",
            ],
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
    assert "<title>true,4,0,0 true,4,0,0 true,4,0,0</title>" in done.stdout, done.stdout[:300] + done.stderr[-2000:]
    others = [line for line in asked if b"google" not in line]  # Chromium asks its maker for the time
    assert [line.split()[1] for line in others] == [b"http://probe.invalid/"], "the frame around the page alone asks"


def _take_down(proxy: socket.socket, asked: list[bytes]) -> None:
    """What a browser asks for, which it doesn't get."""
    while True:
        try:
            connection, _ = proxy.accept()
        except OSError:
            return
        with connection:
            asked.append(connection.recv(200).splitlines()[0])
