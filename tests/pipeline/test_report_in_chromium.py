"""The page of `doit report` in a real browser."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.pipeline.comparing_folders import a_sweep, trained
from tests.pipeline.conftest import Printed
from tests.waiting import HANG_S


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_chromium_shows_the_page_at_every_width_and_asks_nobody(tmp_path: Path, reported: Printed) -> None:
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
    said, asked = chromium(tmp_path, "--dump-dom", f"file://{tmp_path}/all.html")
    assert "<title>true,3,0,0 true,3,0,0 true,3,0,0</title>" in said, said[:300]
    others = [line for line in asked if b"google" not in line]  # Chromium asks its maker for the time
    assert [line.split()[1] for line in others] == [b"http://probe.invalid/"], "the frame around the page alone asks"


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_a_printed_page_is_a4_landscape_with_everything_open_and_nothing_cut(tmp_path: Path, reported: Printed) -> None:
    runs = [trained(tmp_path, lr=lr, metrics={f"val/metric_of_{n}": lr + n for n in range(20)}) for lr in (0.1, 0.2)]
    reported(tmp_path, *(run.key for run in runs), f"file={tmp_path}/page.html")
    chromium(tmp_path, f"--print-to-pdf={tmp_path}/page.pdf", f"file://{tmp_path}/page.html")
    boxes = re.findall(rb"/MediaBox ?\[0 0 (\d+)\.?\d* (\d+)", (tmp_path / "page.pdf").read_bytes())
    assert set(boxes) == {(b"841", b"594")}
    page = (tmp_path / "page.html").read_text().replace("@media print", "@media all")
    (tmp_path / "page.html").write_text(page)
    script = (
        "onload = () => { const frame = document.querySelector('iframe'), page = frame.contentDocument; "
        "const all = [...page.querySelectorAll('main *')]; "
        "document.title = [page.documentElement.scrollWidth <= frame.clientWidth, "
        "all.filter(item => item.getBoundingClientRect().right > frame.clientWidth + 1).length, "
        "[...page.querySelectorAll('details > :not(summary)')].filter(item => !item.offsetHeight).length].join() }"
    )
    frame = '<iframe src="page.html" width="1032" height="700"></iframe>'  # 297 mm without the margins
    (tmp_path / "all.html").write_text(f"<!DOCTYPE html><title></title>{frame}<script>{script}</script>")
    said, _ = chromium(tmp_path, "--dump-dom", f"file://{tmp_path}/all.html")
    assert "<title>true,0,0</title>" in said, said[:300]


def chromium(folder: Path, *words: str) -> tuple[str, list[bytes]]:
    """What it prints, and what it asks the network for, which it doesn't get."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium here")
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=_take_down, args=(proxy, asked), daemon=True).start()
        done = subprocess.run(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
                "--disable-default-apps", f"--proxy-server=127.0.0.1:{proxy.getsockname()[1]}",
                f"--user-data-dir={folder}/profile", *words,
            ],
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
    return done.stdout, asked


def _take_down(proxy: socket.socket, asked: list[bytes]) -> None:
    """What a browser asks for, which it doesn't get."""
    while True:
        try:
            connection, _ = proxy.accept()
        except OSError:
            return
        with connection:
            asked.append(connection.recv(200).splitlines()[0])
