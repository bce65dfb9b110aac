"""Find metrics in the lines that a script prints, for a script that reports none in another way.

A word counts as a metric if one of its parts is in ``_KINDS`` and a number follows: ``loss: 0.31``, ``val_acc=0.91``,
``loss 0.31``, ``{'loss': 0.31}``, ``Test set: Average loss: 0.03, Accuracy: 9908/10000``, a progress bar's
``loss=0.31``, ``│ test_acc │ 0.91 │`` of a table. docs/own-scripts.md lists the forms.

``python -m trainers.script.printed RUN_DIR PATTERN [EARLIER]`` reads the logs of a finished run for a pattern that was
set later. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainers.contract import run_folder
from trainers.core.files import sha256_file
from trainers.script.files import write_sealed, write_text
from trainers.script.metrics_file import Row
from trainers.script.settings import names as names_in
from trainers.script.sources import PatternLines

_OF_RANK_0 = "0 | "
"""Prefix of rank 0's lines in the log of a host."""

_KINDS = {
    *("acc", "acc1", "acc5", "accuracy", "prec", "prec1", "prec5", "auc", "auroc", "f1", "precision", "recall"),
    *("score", "top1", "top5", "iou", "miou", "map"),
    *("loss", "lr", "mae", "mse", "rmse", "r2", "ppl", "perplexity", "bleu", "rouge", "rouge1", "rouge2", "rougel"),
    *("cer", "wer", "psnr", "ssim", "fid", "ndcg", "reward"),
}
_SPLITS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "eval", "evaluation": "eval",
}  # fmt: skip
_SPLIT = rf"(?P<split>\b(?:{'|'.join(_SPLITS)})\b)"
_QUALIFIERS = {
    *("best", "d", "g", "cls", "box", "obj", "reg", "kl", "ce", "bce", "dice", "aux", "gen", "disc", "generator"),
    "discriminator",
    *("macro", "micro", "weighted", "balanced", "f1", "top1", "top5", "top-1", "top-5"),
}
"""Words in front of a name that belong to the name: ``Best acc: 0.91`` is ``best_acc``."""
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+\.\d+|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)"
_PAIR = re.compile(
    rf"(?:(?P<best>\bbest)[ ]+)?(?:{_SPLIT}[ ]+)?(?:(?<![\w-])(?P<qualifier>[A-Za-z][\w-]*)[ ]+)?"
    # a name can begin at few places only, so that a long line without blanks is read once
    rf"(?<![\w/.@?&-])['\"]?(?P<name>[A-Za-z][\w/.@-]*)['\"]?"
    rf"(?P<between>\s*[:=]\s*|\s*[│┃|]\s*|[ ]+)(?:['\"]|(?:tensor|array|[\w.]*float\d+)\()?"
    rf"(?P<number>{_NUMBER})(?:/(?P<whole>\d+))?(?![\w.]*\w|[,:-]\d|/|\s*(?:%\s*\||->|→|=>))",
    re.IGNORECASE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST = 4_000  # characters; a longer line is not meant for users
_SETTING_PARTS = {
    *("steps", "iters", "epochs", "size", "scale", "grad", "min", "max", "weight", "weights", "coef", "decay"),
    *("warmup", "smoothing", "threshold", "every", "freq", "interval", "patience", "target", "type", "fn"),
    *("function", "py", "txt", "json", "yaml", "yml", "csv", "log", "pt", "pth", "ckpt", "md", "so", "cpp", "cu"),
}
"""Parts of a name that make it a setting or a file: ``grad_acc``, ``map_size``, ``loss.py``."""
_SETTINGS = re.compile(
    r"\bNamespace\(|\b(?:config|args|arguments|hparams|hyper-?parameters|settings)\b\W{0,3}[:=({]", re.IGNORECASE
)
_FRACTIONS = {"acc", "accuracy", "score", "precision", "recall", "top1", "top5"}
_BITS = {"8", "16", "32", "64"}
_FIRST = re.compile(rf"\W*{_SPLIT}", re.IGNORECASE)
_COUNT = r"[\s:=#]*[\[(]?\s*(?P<at>\d+)(?:\s*/\s*(?P<of>\d+))?(?![\d.]*\d)"
_EPOCH = re.compile(rf"\bepochs?\b['\"]?{_COUNT}", re.IGNORECASE)
_STEP = re.compile(rf"(?<!/)\b(?:global_step|steps?|iter|iteration|batch)\b['\"]?{_COUNT}", re.IGNORECASE)
_EPOCHS = re.compile(r"['\"]epoch['\"]: ['\"]?(?P<passed>\d+(?:\.\d+)?)['\"]?[,}]")
"""What transformers' Trainer prints: how many epochs have passed, with a fraction."""
_STEP_OF_EPOCH = re.compile(
    r"\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)|\b(?P<bar>\d+)/(?P<length>\d+) \[\d\d:\d\d"
    r"|(?P<batch>\d+)\s*/\s*(?P<batches>\d+) (?:batches|steps|iterations|iters)\b"
)
"""``[640/60000 (1%)]`` behind an epoch, the counter of tqdm, or ``| 5/ 29 batches |``."""
_COUNTERS = (("at", "bar", "batch"), ("of", "length", "batches"))
_EPOCH_AND_STEP = re.compile(r"\W*\[\s*(?P<epoch>\d+)\s*/\s*\d+\]\s*\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)\]")
"""``[0/25][17/600]`` at the beginning of a line."""
_SUMMARY = re.compile(r"\s*\*\s")
"""Begins a line that sums up the evaluation whose lines came before: ``* Acc@1 76.1``."""
_MOST_ROWS = 200_000
_MOST_BYTES = 64_000_000


@dataclass(frozen=True)
class _Line:
    """One line with metrics. ``step`` of ``steps`` in its epoch, or of the run; None: not in the line.

    ``epochs``: how many have passed, of a line that says it with a fraction; ``epoch`` is then the one under way.
    ``split``: that which the line begins with, or sums up.
    """

    metrics: Mapping[str, float]
    epoch: int | None = None
    step: int | None = None
    steps: int | None = None
    epochs: float | None = None
    split: str = ""


_Timed = tuple[float, _Line]
"""Time of printing (unix seconds), and the line."""


def rows(
    log_dir: Path, began_s: float, earlier: Path | None = None, saved: Sequence[Path] = ()
) -> tuple[list[Row], list[Row]]:
    """Return the metrics that rank 0 printed in earlier attempts, up to where this one continues, and in this attempt.

    stdout comes before stderr. Lines have no times: they are spread from ``began_s`` (unix seconds) to the end of each
    file.

    Args:
        log_dir: torchrun's, with files for each rank in ``*/attempt_*/<local rank>/``.
        earlier: the file that ``keep`` wrote; None or a missing file: there was no earlier attempt.
        saved: folders in which the script's checkpoints may lie.
    """
    steps_per_epoch = _steps_per_epoch(saved)
    attempts = _kept(earlier) if earlier is not None else []
    streams = list[list[_Timed]]()
    for path in sorted(log_dir.glob("*/attempt_*/0/std*.log"), reverse=True):
        with suppress(OSError):
            streams.append([*_timed(_tail(path).split("\n"), began_s, path.stat().st_mtime)])
    earlier_rows, own_rows = list[Row](), list[Row]()
    # an attempt that had nothing left to train prints nothing: what those before it printed stands all the same
    for own_lines in [lines for lines in streams if lines] or [[]]:
        names = {name for _, line in own_lines for name in line.metrics}
        known = [[item for item in one if not own_lines or names & item[1].metrics.keys()] for one in attempts]
        printed_lines = list[_Timed]()
        for lines in [*known, own_lines]:
            printed_lines = [*_up_to(printed_lines, lines), *lines]
        numbered = [
            Row(time_s=time_s, step=step, epoch=line.epoch, metrics=dict(line.metrics))
            for (time_s, _), (step, line) in zip(
                printed_lines, _with_steps((line for _, line in printed_lines), steps_per_epoch), strict=True
            )
        ]
        earlier_rows += numbered[: len(printed_lines) - len(own_lines)]
        own_rows += numbered[len(printed_lines) - len(own_lines) :]
    return earlier_rows[:_MOST_ROWS], own_rows[:_MOST_ROWS]


def keep(run_dir: Path, began_s: Mapping[int, float]) -> None:
    """Store the lines with metrics that earlier attempts printed, for ``rows`` of the next attempt. Raises OSError.

    Args:
        began_s: number of an attempt → its start in unix seconds.
    """
    kept = list[str]()
    for number, start_s in sorted(began_s.items()):
        for log in sorted((run_dir / run_folder.ATTEMPTS / str(number)).glob("*.log")):
            texts = [of_rank_0(line) for line in _tail(log).split("\n")]
            for at, text in enumerate(texts, 1):
                if parse(_last_state(text)).metrics:
                    time_s = _spread(start_s, log.stat().st_mtime, at, len(texts))
                    kept.append(json.dumps({"attempt": number, "t": time_s, "text": text}) + "\n")
    if kept:
        path = run_dir / run_folder.WORK / "node0" / run_folder.PRINTED
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(kept[-_MOST_ROWS:]))


def of_rank_0(line: str) -> str:
    """Return the text of rank 0 in a line of a host's log; '' for another one, and for a progress bar under way."""
    is_whole = line.startswith(_OF_RANK_0) and not line.endswith(run_folder.UNFINISHED)
    return line.removeprefix(_OF_RANK_0) if is_whole else ""


def _kept(path: Path) -> list[list[_Timed]]:
    """Return the stored lines of each earlier attempt; none if the file is missing or damaged."""
    attempts: dict[int, list[_Timed]] = {}
    try:
        values = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for value, line in zip(values, _parsed(value["text"] for value in values), strict=True):
            attempts.setdefault(int(value["attempt"]), []).append((float(value["t"]), line))
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [lines for _, lines in sorted(attempts.items())]


def _timed(lines: Sequence[str], began_s: float, end_s: float) -> Iterator[_Timed]:
    for at, line in enumerate(_parsed(lines), 1):
        if line.metrics:
            yield _spread(began_s, end_s, at, len(lines)), line


def _parsed(texts: Iterable[str]) -> Iterator[_Line]:
    """Parse lines one after another, as one may sum up those before it."""
    split = ""
    for text in texts:
        line = parse(_last_state(text), split)
        split = line.split if line.metrics else split
        yield line


def _spread(began_s: float, end_s: float, at: int, of: int) -> float:
    return began_s + max(0.0, end_s - began_s) * at / of


def _last_state(text: str) -> str:
    """Return the text behind the last carriage return, the last state of a progress bar."""
    return text.split("\r")[-1]


def _up_to(old: Sequence[_Timed], new: Sequence[_Timed]) -> list[_Timed]:
    """Return the lines of ``old`` before the position at which ``new`` begins; none if lines have no positions."""
    if not new:
        return [*old]
    begins = next((position for _, line in new if (position := _position(line)) is not None), None)
    positions = list[tuple[float, int]]()
    for _, line in old:
        positions.append(_position(line) or (positions[-1] if positions else (0, 0)))
    if begins is None or positions != sorted(positions):
        return []
    return [item for item, position in zip(old, positions, strict=True) if position < begins]


def _steps_per_epoch(folders: Sequence[Path]) -> float | None:
    """Return the steps of an epoch from the newest trainer_state.json of transformers; None if there is none."""
    states = [path for folder in folders for path in folder.rglob("trainer_state.json")]
    try:
        state = json.loads(max(states, key=lambda path: path.stat().st_mtime_ns).read_text(encoding="utf-8"))
        return float(state["global_step"] / state["epoch"])
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):  # ValueError: also of no states
        return None


def _position(line: _Line) -> tuple[float, int] | None:
    """Return the epoch and step in a line; None without either."""
    if line.epochs is not None:
        return line.epochs, 0
    return None if line.epoch is None and line.step is None else (line.epoch or 0, line.step or 0)


def _tail(path: Path) -> str:
    """Return the last part of a log, which may be larger than memory. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).decode(errors="replace")


def parse(text: str, split_before: str = "") -> _Line:
    """Return the metrics of one line, and its epoch and step. A name with two different values is left out.

    Args:
        split_before: of the line with metrics before it, which a line that begins with a star sums up.
    """
    if len(text) > _LONGEST:
        return _Line({})
    text = _COLOURS.sub("", text)
    if _SETTINGS.search(text):  # printed before the training
        return _Line({})
    first = _FIRST.match(text)
    split = _SPLITS[first["split"].lower()] if first else split_before if _SUMMARY.match(text) else ""
    values: dict[str, set[float]] = {}
    for match in _PAIR.finditer(text):
        if _is_metric(match):
            values.setdefault(_name(match, split), set()).add(_value(match))
    metrics = {name: numbers.pop() for name, numbers in values.items() if len(numbers) == 1}
    if all(name.rpartition("/")[2] == "lr" for name in metrics):  # a setting, unless the line has a result
        metrics = {}
    if both := _EPOCH_AND_STEP.match(text):
        return _Line(metrics, int(both["epoch"]), int(both["at"]), int(both["of"]), split=split)
    epoch, step = _EPOCH.search(text), _STEP.search(text)
    at, of = (step["at"], step["of"]) if step else (None, None)
    counts_other = epoch is None and split not in ("", "train")  # the batches of an evaluation
    inner = None if step or counts_other else _STEP_OF_EPOCH.search(text, epoch.end("at") if epoch else 0)
    if inner:
        at, of = (next(filter(None, inner.group(*names))) for names in _COUNTERS)
    if step is None and (passed := _EPOCHS.search(text)):
        epochs = float(passed["passed"])
        return _Line(metrics, epoch=max(1, math.ceil(epochs)), epochs=epochs, split=split)
    at_epoch, at_step, steps = (int(number) if number else None for number in (epoch and epoch["at"], at, of))
    return _Line(metrics, at_epoch, at_step, steps, split=split)


def _is_metric(match: re.Match[str]) -> bool:
    parts, number = re.split(r"[/_.@-]+", match["name"].lower()), match["number"]
    if not _SETTING_PARTS.isdisjoint(parts) or match["whole"] == "0":
        return False
    if _KINDS.isdisjoint(parts) or ("precision" in parts and number in _BITS):  # precision: 16
        return False
    if match["whole"] is not None and (not number.isdecimal() or _FRACTIONS.isdisjoint(parts)):
        return False  # loss: 3/4 batches
    if match["between"].strip():
        return True
    is_name = all(part in _KINDS or part in _SPLITS or part.isdecimal() for part in parts)  # train_loss 0.2, Acc@1 76.1
    return is_name and (not number.isdecimal() or match["whole"] is not None)  # and not: map 3 workers


def _name(match: re.Match[str], split: str) -> str:
    """Return the metric's name: ``Loss`` behind ``Test`` is ``test/loss``; a name that contains a split stays."""
    name = match["name"].lower() if match["name"].istitle() or match["name"].isupper() else match["name"]
    qualifier = (match["qualifier"] or "").lower()
    name = f"{qualifier}_{name}" if qualifier in _QUALIFIERS else name
    name = f"best_{name}" if match["best"] and not name.startswith("best_") else name
    split = _SPLITS[match["split"].lower()] if match["split"] else _SPLITS.get(qualifier, split)
    return name if not split or not _SPLITS.keys().isdisjoint(re.split(r"[/_.-]+", name.lower())) else f"{split}/{name}"


def _value(match: re.Match[str]) -> float:
    """Return the number; ``9908/10000`` is a fraction."""
    number, whole = float(match["number"].replace(",", "")), match["whole"]
    return number / int(whole) if whole and int(whole) else number


def _with_steps(lines: Iterable[_Line], steps_per_epoch: float | None = None) -> Iterator[tuple[int, _Line]]:
    """Number the lines: by their steps, if these grow; by epochs passed; by epoch and step; by epoch; else by counting.

    A line without a position, such as an evaluation behind an epoch, has the position of the line before.
    """
    placed: list[_Line] = []
    for line in lines:
        before = placed[-1] if placed else _Line({})
        if line.epoch is None:
            line = replace(line, epoch=before.epoch, epochs=before.epochs)
        if line.step is None and line.epoch == before.epoch:
            line = replace(line, step=before.step, steps=before.steps)
        placed.append(line)
    length = max((line.steps for line in placed if line.steps), default=0)
    # a step of its epoch, of which only one was printed, doesn't grow
    begins_anew = any(
        old.epoch != new.epoch and (old.step or 0) >= (new.step or 0) for old, new in itertools.pairwise(placed)
    )
    by_step = [None if begins_anew else line.step for line in placed]
    by_both = [
        None if line.epoch is None or not length else line.epoch * length + (line.step if line.step is not None else 0)
        for line in placed
    ]
    by_epochs = [
        None if line.epochs is None or steps_per_epoch is None else round(line.epochs * steps_per_epoch)
        for line in placed
    ]
    by_epoch = [line.epoch if line.epochs is None or line.epochs.is_integer() else None for line in placed]
    for steps in (by_step, by_epochs, by_both, by_epoch):
        known = [step for step in steps if step is not None]
        if len(known) == len(placed) and known == sorted(known):
            yield from zip(known, placed, strict=True)
            return
    yield from enumerate(placed, 1)


# The logs of a finished run, read for a pattern.


def read_stored(run_dir: Path, pattern: str, earlier: str = "") -> None:
    """Add the matches of ``program.metrics_pattern`` in a finished run's logs to metrics.jsonl and summary.json.

    The metrics of the ``earlier`` pattern are removed. Raises OSError; ValueError: the folder isn't that of a script
    that has ended well.
    """
    metrics, summary = run_dir / run_folder.METRICS, run_dir / run_folder.SUMMARY
    known = _json(summary)
    del known["sha256"]
    names = {*re.compile(pattern).groupindex, *(re.compile(earlier).groupindex if earlier else ())}
    old = [row for line in metrics.read_text(encoding="utf-8").splitlines() if (row := _without(line, names))]
    attempt = old[-1]["attempt"] if old else _json(run_dir / run_folder.PLAN).get("run_id", "")
    parsed = [row.as_json(attempt) for row in _stored_rows(run_dir, pattern)]
    new = [row for row in parsed if row["metrics"]]
    last = {name: value for row in (*old, *new) for name, value in row["metrics"].items()}
    steps = [row["step"] for row in (*old, *new)]
    write_text(metrics, "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in (*old, *new)))
    digests = {**known["outputs_sha256"], metrics.name: sha256_file(metrics)}
    write_sealed(summary, {**known, "steps": max(steps, default=None), "metrics": last, "outputs_sha256": digests})


def _without(line: str, names: set[str]) -> dict[str, Any] | None:
    """Return a row of metrics.jsonl without the metrics of these names; None if nothing is left."""
    row: dict[str, Any] = json.loads(line)
    row["metrics"] = {name: value for name, value in row["metrics"].items() if name not in names}
    return row if row["metrics"] else None


def _stored_rows(run_dir: Path, pattern: str) -> list[Row]:
    """Return the rows in the log of the last attempt; of all attempts for a script that resumes from checkpoints."""
    program: dict[str, Any] = _json(run_dir / run_folder.CONFIG)["program"]
    numbers = sorted(int(path.name) for path in (run_dir / run_folder.ATTEMPTS).iterdir() if path.name.isdigit())
    if "resume" not in names_in(json.dumps([program.get("args"), program.get("env")])):
        numbers = numbers[-1:]
    rows, pattern_lines = list[Row](), PatternLines(pattern, run_dir)
    for number in numbers:
        fresh = list(_of_attempt(pattern_lines, run_dir, number))
        rows = [row for row in rows if not fresh or row.step < fresh[0].step] + fresh
    return rows


def _of_attempt(pattern_lines: PatternLines, run_dir: Path, number: int) -> Iterator[Row]:
    """Yield the rows of one attempt. Lines have no times: they are spread from the launch to the end of the log."""
    for log in sorted((run_dir / run_folder.ATTEMPTS / str(number)).glob("*.log")):
        lines, end_s = log.read_text(encoding="utf-8", errors="replace").splitlines(), log.stat().st_mtime
        began_s = min(end_s, (run_dir / run_folder.PLAN).stat().st_mtime)
        for at, line in enumerate(lines, 1):
            if text := of_rank_0(line):
                yield from pattern_lines.in_line(text, _spread(began_s, end_s, at, len(lines)))


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


if __name__ == "__main__":
    read_stored(Path(sys.argv[1]), *sys.argv[2:])
