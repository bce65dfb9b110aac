"""MLflow's pages of a real sweep, opened in headless Chromium with a fresh profile: what they have to show, asserted,
and their pictures.

    python benchmarks/pages.py docs/pictures

A 3 × 3 sweep of a tiny training is run and `doit ui` started on its store. Then table, charts, comparison and the page
of one run are opened by the addresses that `doit ui` prints, then that of `doit report`: light, dark and as wide as a
phone, and its curves. Needs Debian's package chromium; nothing of it is patched.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket  # websocket-client
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DOIT = str(Path(sys.executable).parent / "doit")
SWEEP = ("experiment=quickstart", "trainer.epochs=8", "optimizer.lr=0.1,0.03,0.01", "seed=range(3)")
NAMES = [f"lr={lr} seed={seed} · " for lr, seed in itertools.product(("0.1", "0.03", "0.01"), range(3))]
WIDTH, HEIGHT = 1440, 900
REPORT_VIEWS, REPORT_HEIGHT, GAP = {"light": 1200, "dark": 1200, "phone": 500}, 1080, 16
CURVES = (1200, 440)  # which ends below the first row of charts
MOST_BYTES = 300_000
PATIENCE_S = 90.0
CLOSE_ASSISTANT = "document.querySelector('[data-component-id=\"mlflow.assistant.chat_panel.close\"]')?.click()"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, help="the folder that the pictures go into")
    pictures = parser.parse_args().pictures.absolute()
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paceline-pages-") as name:
        folder = Path(name)
        where = (f"paths.runs={folder}/runs", f"tracking.uri=sqlite:///{folder}/mlflow.db")
        subprocess.run([DOIT, "sweep", *SWEEP, *where], cwd=ROOT, check=True)
        keys = [path.parent.name for path in sorted((folder / "runs").glob("*/result.json"))]
        assert len(keys) == 9, keys
        with browser(folder / "profile") as page:
            with links(where) as all_runs:
                columns = ["val/accuracy", "test/accuracy", "val/loss", "optimizer.lr", "seed", "Duration"]
                look(page, all_runs["table"], [*NAMES, *columns], pictures / "table.webp")
                look(page, all_runs["charts"], [*NAMES, "curves", "train/loss"], pictures / "charts.webp")
            with links((*where, *keys[:2], "charts=val/accuracy")) as two:
                look(page, two["charts"], ["val/accuracy"], pictures / "chosen.webp")
                look(page, two["side by side"], ["Comparing 2 Runs"], pictures / "compare.webp")
            with links((*where, keys[0])) as one:
                wanted = ["The command that repeats it", "doit train", "optimizer.lr", "digits"]
                look(page, one["run"], wanted, pictures / "run.webp")
                files = ["checkpoints", "evaluation", "summary.json"]
                look(page, one["run"].replace("?", "/artifacts?"), files, pictures / "artifacts.webp")
            told = subprocess.run([DOIT, "report", *where], cwd=ROOT, check=True, capture_output=True, text=True)
            (report,) = re.findall(r"report +(\S+\.html)", told.stdout)
            wanted = ["9 of 9 runs finished, 3 configurations", "Against the best", "val/accuracy", "Provenance", *keys]
            look_at_report(page, (ROOT / report).as_uri(), wanted, pictures)
    too_large = [picture.name for picture in pictures.iterdir() if picture.stat().st_size >= MOST_BYTES]
    if too_large:
        print(f"{', '.join(too_large)}: {MOST_BYTES:,} bytes or more", file=sys.stderr)
    return 1 if too_large else 0


def look_at_report(page: Page, address: str, wanted: list[str], pictures: Path) -> None:
    """Take three views of the page beside each other, and one of its curves."""
    shots = []
    for name, width in REPORT_VIEWS.items():
        page.resize(width, REPORT_HEIGHT)
        scheme = "dark" if name == "dark" else "light"
        page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        look(page, address, wanted, pictures / f"report-{name}.webp")
        with Image.open(pictures / f"report-{name}.webp") as shot:
            shots.append(shot.convert("RGB"))
        (pictures / f"report-{name}.webp").unlink()
    whole = Image.new("RGB", (sum(shot.width + GAP for shot in shots) - GAP, REPORT_HEIGHT), "#8c959f")
    at = 0
    for shot in shots:
        whole.paste(shot, (at, 0))
        at += shot.width + GAP
    whole.save(pictures / "report.webp", quality=70)
    page.resize(*CURVES)
    look(page, f"{address}#curves", wanted, pictures / "curves.webp")


@contextlib.contextmanager
def links(words: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """What `doit ui` prints: name of a page → its address."""
    page = subprocess.Popen([DOIT, "ui", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert page.stdout is not None
    found: dict[str, str] = {}
    try:
        for line in page.stdout:
            name, _, address = line.strip().partition(": ")
            if address.startswith("http"):
                found[name] = address
            if name == "table" and "side by side" not in found and len(words) < 4 and all("=" in w for w in words):
                break
            if name in ("run", "side by side"):
                break
        yield found
    finally:
        os.killpg(page.pid, signal.SIGTERM)
        page.wait()


class Page:
    """One tab of a browser, driven by the DevTools protocol."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=PATIENCE_S, suppress_origin=True)
        self._numbers = itertools.count(1)
        for name in ("Page.enable", "Runtime.enable"):
            self.ask(name)
        self.resize(WIDTH, HEIGHT)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def text(self) -> str:
        """What a person reads on the page, and what a cell too narrow for its text would show."""
        shown = (
            "document.body.innerText + '\\n' + [...document.querySelectorAll('[title]')].map(e => e.title).join('\\n')"
        )
        return self.value(shown)

    def value(self, expression: str) -> str:
        """That of an expression, '' for none."""
        return str(self.ask("Runtime.evaluate", expression=expression)["result"].get("value", ""))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    program = shutil.which("chromium")
    assert program, "apt-get install chromium"
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        "--no-first-run",
    ]
    chromium = subprocess.Popen(
        [program, *flags, f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        told = profile / "DevToolsActivePort"
        wait_for(told.exists, "chromium did not start")
        port = told.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tabs = json.load(answer)
        yield Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
    finally:
        os.killpg(chromium.pid, signal.SIGTERM)
        chromium.wait()


def look(page: Page, address: str, wanted: list[str], picture: Path) -> None:
    """Open a page, wait until all of ``wanted`` stands in it, and take its picture."""
    began = time.monotonic()
    page.ask("Page.navigate", url="about:blank")  # another address of the same page would not load it anew
    page.ask("Page.navigate", url=address)
    wait_for(lambda: all(word in page.text() for word in wanted), lambda: missing(page, wanted, picture))
    shown_s = time.monotonic() - began
    page.value(CLOSE_ASSISTANT)  # which a fresh profile is shown, over a quarter of the page
    time.sleep(1.5)  # charts are drawn a moment after their titles
    picture.write_bytes(base64.b64decode(page.ask("Page.captureScreenshot", format="webp", quality=80)["data"]))
    print(f"{picture.name}: {len(wanted)} texts stand in it after {shown_s:.1f} s; {picture.stat().st_size:,} bytes")


def missing(page: Page, wanted: list[str], picture: Path) -> str:
    text = page.text()
    picture.with_suffix(".failed.png").write_bytes(base64.b64decode(page.ask("Page.captureScreenshot")["data"]))
    return f"{picture.name} lacks {[word for word in wanted if word not in text]}:\n{text[:3000]}"


def wait_for(condition: Any, problem: Any) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(problem() if callable(problem) else problem)
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
