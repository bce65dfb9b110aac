"""Draws docs/pictures/terminal.svg: the view of a training, of what a real run tells while it goes on.

    python -m benchmarks.terminal_picture [words of doit train]

Starts that run in a folder of its own, follows it as `doit status watch=1` does, and keeps a frame of its middle with
lines above it. Without words: the quickstart, on two hosts where a lab is up (`doit lab hosts=2`).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pipeline.cluster.failures import is_worth_showing
from pipeline.core.specs import LogLine
from pipeline.execution.attempting import shown
from pipeline.live.pictures import RunPicture, first_state
from pipeline.live.watching import AttemptFiles
from pipeline.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/pictures/terminal.svg"
WIDTH, HEIGHT, LINES = 116, 24, 6
MIDDLE = (0.4, 0.8)


def main() -> int:
    """Start, follow, draw."""
    lab = (ROOT / ".lab/ssh_config").exists()
    words = sys.argv[1:] or ["experiment=quickstart", "trainer.epochs=200", *(["cluster=two_node"] if lab else [])]
    with tempfile.TemporaryDirectory() as runs:
        argv = [sys.executable, "-m", "doit", "train", *words, f"paths.runs={runs}", "tracking=none"]
        child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            frame = _middle(Path(runs), child)
        finally:
            child.terminate()
            child.wait()
    if frame is None:
        print("the run ended before its middle was seen; more trainer.epochs= make it longer", file=sys.stderr)
        return 1
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ doit train {' '.join(words)}"))
    console.print(frame[0])
    console.print(frame[1].drawn(frame[2], WIDTH, HEIGHT))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(_without_fonts(console.export_svg(title="doit train")), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
    return 0


def _without_fonts(svg: str) -> str:
    """rich has the browser fetch a font from elsewhere; its own monospace does as well."""
    return re.sub(r" *@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def _middle(runs: Path, child: subprocess.Popen[bytes]) -> tuple[Text, RunPicture, float] | None:
    """The newest lines and the state, once the hosts tell their figures."""
    picture: RunPicture | None = None
    files, lines = None, list[str]()
    while child.poll() is None:
        time.sleep(0.1)
        found = sorted(runs.glob("*/config.json"))
        if not found:
            continue
        folder = RunFolder(found[0].parent)
        if picture is None or files is None:
            picture = RunPicture(first_state(folder.key, folder.read_json("config.json") or {}), folder.path)
            files = AttemptFiles(folder)
        now = time.monotonic()
        for event in files.look():
            picture.take(event, now)
            if isinstance(event, LogLine) and is_worth_showing(event):
                lines.append(shown(event))
        picture.look(now)
        hosts = picture.state.hosts.values()
        told = bool(hosts) and all(host.usage and host.steps_per_s for host in hosts)
        if told and MIDDLE[0] <= picture.state.done <= MIDDLE[1]:
            return Text("\n".join(lines[-LINES:])), picture, now
    return None


if __name__ == "__main__":
    sys.exit(main())
