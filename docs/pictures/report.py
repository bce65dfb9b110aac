"""The picture of a report in README: light, dark and as wide as a phone, beside each other, taken by a real browser.

    python docs/pictures/report.py [FOLDER]

Of the newest sweep in that folder of runs. Without one a sweep of the quickstart is trained first: a good
learning rate, a small one, and one that fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(__file__).with_name("report.png")
WORDS = (
    "experiment=quickstart", "trainer.epochs=4", "optimizer.lr=0.1,0.03,1e38", "seed=range(3)", "tracking=none",
)  # fmt: skip
VIEWS = (("light", 1000, 1180), ("dark", 1000, 1180), ("phone", 500, 1180))
MOST_BYTES = 300_000
GAP = 16


def main() -> None:
    where = f"paths.runs={sys.argv[1] if len(sys.argv) > 1 else ROOT / 'runs'}"
    if len(sys.argv) < 2:
        subprocess.run([sys.executable, "-m", "doit", "sweep", *WORDS, where], cwd=ROOT, check=False)  # one value fails
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary, "report.html")
        subprocess.run([sys.executable, "-m", "doit", "report", where, f"file={page}"], cwd=ROOT, check=True)
        shots = [shot(page, Path(temporary, f"{name}.png"), name, width, height) for name, width, height in VIEWS]
        beside(shots).save(TARGET, optimize=True)
    if TARGET.stat().st_size >= MOST_BYTES:
        sys.exit(f"{TARGET} has {TARGET.stat().st_size:,} bytes; at most {MOST_BYTES:,}")


def shot(page: Path, to: Path, name: str, width: int, height: int) -> Image.Image:
    """One view of the page; the browser is refused every address."""
    dark = ["--blink-settings=preferredColorScheme=0"] if name == "dark" else []
    command = [
        "chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
        *dark, f"--screenshot={to}", f"--window-size={width},{height}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(to) as picture:
        return picture.convert("RGB")


def beside(shots: list[Image.Image]) -> Image.Image:
    """In one row, in few colours: a page has no more."""
    width = sum(shot.width for shot in shots) + GAP * (len(shots) - 1)
    whole = Image.new("RGB", (width, max(shot.height for shot in shots)), "#8c959f")
    at = 0
    for one in shots:
        whole.paste(one, (at, 0))
        at += one.width + GAP
    return whole.quantize(128, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
