"""Draws docs/pictures/terminal.svg: a recording of a real `doit train` in a terminal, played again and again.

    python benchmarks/terminal_picture.py [words of doit train]

Without words: the quickstart, on two hosts where a lab is up (`doit lab --hosts 2`). The command runs in a
pseudo-terminal; its screen is drawn by rich at a few moments, and a style sheet shows one frame after the other. Where
nothing moves (a reader who wants no motion, a program that draws no animation) the last frame stands.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/pictures/terminal.svg"
WIDTH, HEIGHT = 100, 20
FRAMES, PLAYED_S, REST_S = 15, 6.0, 3.0
MOST_BYTES = 300_000
_CONTROL = re.compile(r"\x1b\[(?P<letters>[?0-9;]*)(?P<what>[A-Za-z])|(?P<char>[\r\n])")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What the terminal shows from a moment on, with its colours."""

    at_s: float
    lines: tuple[str, ...]


def main() -> int:
    """Record, choose, draw."""
    lab = (ROOT / ".lab/ssh_config").exists()
    words = sys.argv[1:] or ["experiment=quickstart", *(["cluster=two_node"] if lab else [])]
    with tempfile.TemporaryDirectory() as runs:
        began = time.monotonic()
        recorded = [*screens(["train", *words, f"paths.runs={runs}", "tracking=none"])]
        took_s = time.monotonic() - began
        frames = chosen([(at, tuple(line.replace(f"{runs}/", "runs/") for line in lines)) for at, lines in recorded])
    if "FINISHED" not in "".join(frames[-1].lines):
        print("\n".join(frames[-1].lines), file=sys.stderr)
        return 1
    PICTURE.write_text(animated(frames, f"$ doit train {' '.join(words)}", took_s), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(frames)} frames of {took_s:.1f} s, {PICTURE.stat().st_size:,} bytes")
    return 0 if PICTURE.stat().st_size < MOST_BYTES else 1


def screens(words: Sequence[str]) -> Iterator[tuple[float, list[str]]]:
    """Run doit in a terminal; yield its time and the lines on its screen after each output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
        os.execv(sys.executable, [sys.executable, "-m", "doit", *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    began, lines, row, rest = time.monotonic(), [""], 0, b""
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # on Linux the end of a terminal is an error
            read = b""
        if not read:
            os.waitpid(pid, 0)
            return
        text, rest = _whole(rest + read)
        row = typed(text, lines, row)
        yield time.monotonic() - began, list(lines)


def _whole(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the beginning of a character or sequence that goes on in the next output."""
    end = len(data)
    if (escape := data.rfind(b"\x1b")) >= 0 and not re.search(rb"[A-Za-z]", data[escape:]):
        end = escape
    while end and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    if end and data[end - 1] >= 0xC0:
        end -= 1
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        return data[:end].decode(errors="replace"), data[end:]


def typed(text: str, lines: list[str], row: int) -> int:
    """Change the lines as a terminal would, for the sequences that the live view uses; return the cursor's row."""
    at = 0
    for control in _CONTROL.finditer(text):
        lines[row] += text[at : control.start()]
        at = control.end()
        if control["what"] == "m":
            lines[row] += control[0]
        elif control["what"] == "K":
            lines[row] = ""
        elif control["what"] == "A":
            row = max(0, row - int(control["letters"] or 1))
        elif control["char"] == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
    lines[row] += text[at:]
    return row


def chosen(recorded: Sequence[tuple[float, tuple[str, ...]]]) -> list[Frame]:
    """Return frames at even distances, and the last one; equal ones once."""
    last_s = recorded[-1][0]
    frames: list[Frame] = []
    for number in range(FRAMES):
        moment = last_s * (number + 1) / FRAMES
        shown = [lines for at, lines in recorded if at <= moment]
        if shown and (not frames or frames[-1].lines != shown[-1]):
            frames.append(Frame(at_s=moment / last_s * PLAYED_S, lines=shown[-1]))
    return frames


def animated(frames: Sequence[Frame], command: str, took_s: float) -> str:
    """Return an SVG that shows each frame from its moment on, and the last one longer."""
    total, ends = PLAYED_S + REST_S, [*(frame.at_s for frame in frames[1:]), PLAYED_S + REST_S]
    rules, groups, whole = [], [], ""
    for number, (frame, end) in enumerate(zip(frames, ends, strict=True)):
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
        filled = [line for line in frame.lines if line.strip()] if frame is frames[-1] else frame.lines
        shown = [command, *filled][-HEIGHT:]
        for line in [*shown, *[""] * (HEIGHT - len(shown))]:
            console.print(Text.from_ansi(line, no_wrap=True, overflow="crop"))
        whole = console.export_svg(title=f"doit train, {took_s:.0f} s played in {PLAYED_S:.0f}", unique_id=f"f{number}")
        (style,) = re.findall(rf"^ *\.f{number}-r\d.*(?:\n *\.f{number}-r\d.*)*", whole, flags=re.MULTILINE)
        begin_at, end_at = (100 * at / total for at in (0.0 if number == 0 else frame.at_s, end))
        hidden = "" if number == 0 else "0%{visibility:hidden}"
        after = "" if frame is frames[-1] else f"{end_at:.1f}%{{visibility:hidden}}"
        rules += [style, f"@keyframes k{number}{{{hidden}{begin_at:.1f}%{{visibility:visible}}{after}}}"]
        still = "visible" if frame is frames[-1] else "hidden"
        rules.append(f".k{number}{{visibility:{still};animation:k{number} {total:g}s step-end infinite}}")
        (body,) = re.findall(rf'(<g class="f{number}-matrix">.*?</g>)\n *</g>', whole, flags=re.DOTALL)
        groups.append(f'<g class="k{number}">{body.replace(f"f{number}-matrix", "matrix")}</g>')
    number = len(frames) - 1
    whole = re.sub(r" *@font-face \{.*?\}\n", "", whole, flags=re.DOTALL)  # fetched from elsewhere
    whole = re.sub(rf"^ *\.f{number}-r\d.*\n", "", whole, flags=re.MULTILINE).replace(f"f{number}-matrix", "matrix")
    whole = re.sub(r'<clipPath id="f\d+-line-.*?</clipPath>\n*', "", whole, flags=re.DOTALL)
    rules.append("@media (prefers-reduced-motion: reduce){g{animation:none!important}}")
    whole = whole.replace("</style>", "\n".join(rules) + "\n</style>", 1)
    head, _, tail = whole.partition('<g class="matrix">')
    text = head + "\n".join(groups) + tail.partition("</g>")[2]
    return re.sub(r' clip-path="url\(#f\d+-line-\d+\)"', "", text)


if __name__ == "__main__":
    sys.exit(main())
