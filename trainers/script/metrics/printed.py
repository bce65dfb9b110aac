"""The reader of the metrics that a script has printed, for a script that reports none in another way
(program.metrics=auto). It runs when the script has ended. An attempt that resumes doesn't print again what earlier
attempts printed. So their lines are kept (``keep_lines``), and those from before the epoch and step at which this
attempt resumed are put in front of its own."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainers.contract import run_folder
from trainers.script.files import work_folder, write_text
from trainers.script.metrics.metrics_file import Row

_OF_RANK_0 = "0 | "
"""Prefix of rank 0's lines in the log of a host."""
_MOST_ROWS = 200_000
_MOST_BYTES = 64_000_000  # read from the end of a log


class TimedLine(NamedTuple):
    """A line with metrics, and when it was printed in unix seconds, as far as known."""

    time_s: float
    line: PrintedLine


class PrintedRows(NamedTuple):
    """The rows of earlier attempts that stay, and those of this attempt."""

    earlier: list[Row]
    own: list[Row]


def printed_rows(
    log_dir: Path, began_s: float, kept_lines: Path | None = None, saved: Sequence[Path] = ()
) -> PrintedRows:
    """Return the metrics that rank 0 printed, those in stdout first. Times are spread evenly over the attempt.
    ``log_dir``: torchrun's; ``began_s``: start of the attempt (unix); ``kept_lines``: the file of ``keep_lines``;
    ``saved``: folders that may hold the state of transformers' Trainer, which knows the steps of an epoch.
    """
    steps_per_epoch = _steps_per_epoch(saved)
    attempts = _kept_attempts(kept_lines) if kept_lines is not None else []
    streams = list[list[TimedLine]]()
    for path in sorted(log_dir.glob("*/attempt_*/0/std*.log"), reverse=True):
        with suppress(OSError):
            streams.append([*_timed_lines(_tail(path).split("\n"), began_s, path.stat().st_mtime)])
    streams = [lines for lines in streams if lines] or [[]]
    # An attempt that resumed at the end trains nothing: it prints nothing, or an evaluation without epoch and step. Its
    # lines are put behind all earlier ones. If earlier attempts printed no positions either, the script never prints
    # any, and a lack of them doesn't show that nothing was trained.
    trained_nothing = not any(map(_has_positions, streams)) and (streams == [[]] or any(map(_has_positions, attempts)))
    if trained_nothing:
        streams = [[item for lines in streams for item in lines]]
    earlier_rows, own_rows = list[Row](), list[Row]()
    for own_lines in streams:
        names = {name for item in own_lines for name in item.line.metrics}
        # Each attempt replaces the lines of those before it from its own first position on. Earlier lines are of both
        # stdout and stderr without saying of which, so the names of their metrics tell which belong to this stream.
        earlier_lines = list[TimedLine]()
        for attempt in attempts:
            lines = [item for item in attempt if trained_nothing or names & item.line.metrics.keys()]
            # likewise, an earlier attempt without any position trained nothing, and its evaluation was made again
            if _has_positions(attempt) or not _has_positions(earlier_lines):
                earlier_lines = [*_lines_before(lines, earlier_lines), *lines]
        if trained_nothing:
            earlier_lines = [
                item
                for item in earlier_lines
                if item.line.position is not None or not names >= item.line.metrics.keys()
            ]
        else:
            earlier_lines = _lines_before(own_lines, earlier_lines)
        numbered = [*_rows_with_steps([*earlier_lines, *own_lines], steps_per_epoch)]
        earlier_rows += numbered[: len(earlier_lines)]
        own_rows += numbered[len(earlier_lines) :]
    return PrintedRows(earlier_rows[:_MOST_ROWS], own_rows[:_MOST_ROWS])


def keep_lines(run_dir: Path, began_s: Mapping[int, float]) -> None:
    """Store the lines with metrics of earlier attempts (number → start, unix seconds) for the next. Raises OSError."""
    kept = list[str]()
    for attempt, start_s in sorted(began_s.items()):
        for log in sorted((run_dir / run_folder.ATTEMPTS / str(attempt)).glob("*.log")):
            texts = [text_of_rank_0(line) for line in _tail(log).split("\n")]
            for number, text in enumerate(texts, 1):
                if parse_line(text).metrics:
                    time_s = spread_time(start_s, log.stat().st_mtime, number, len(texts))
                    kept.append(json.dumps({"attempt": attempt, "t": time_s, "text": text}) + "\n")
    if kept:
        path = work_folder(run_dir, 0) / run_folder.PRINTED
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(kept[-_MOST_ROWS:]))


def _kept_attempts(path: Path) -> list[list[TimedLine]]:
    """Return the lines of each earlier attempt that ``keep_lines`` stored; none if the file is missing or damaged."""
    attempts: dict[int, list[TimedLine]] = {}
    try:
        entries = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for entry, line in zip(entries, _parsed_lines(entry["text"] for entry in entries), strict=True):
            attempts.setdefault(int(entry["attempt"]), []).append(TimedLine(float(entry["t"]), line))
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [lines for _, lines in sorted(attempts.items())]


def text_of_rank_0(line: str) -> str:
    """Return the text of rank 0 in a line of a host's log; '' for other ranks, and an unfinished progress bar."""
    is_whole = line.startswith(_OF_RANK_0) and not line.endswith(run_folder.UNFINISHED)
    return line.removeprefix(_OF_RANK_0) if is_whole else ""


def spread_time(began_s: float, end_s: float, number: int, count: int) -> float:
    """Return the time of line ``number`` (from 1) of ``count``, spread evenly over the time of its log."""
    return began_s + max(0.0, end_s - began_s) * number / count


def _timed_lines(texts: Sequence[str], began_s: float, end_s: float) -> Iterator[TimedLine]:
    for number, line in enumerate(_parsed_lines(texts), 1):
        if line.metrics:
            yield TimedLine(spread_time(began_s, end_s, number, len(texts)), line)


def _parsed_lines(texts: Iterable[str]) -> Iterator[PrintedLine]:
    """Parse lines one after another, as a line may sum up those before it."""
    split = ""
    for text in texts:
        line = parse_line(text, split)
        split = line.split if line.metrics else split
        yield line


def _tail(path: Path) -> str:
    """Return the last part of a log, which may be larger than memory. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).decode(errors="replace")


def _has_positions(lines: Sequence[TimedLine]) -> bool:
    return any(item.line.position is not None for item in lines)


def _lines_before(new: Sequence[TimedLine], old: Sequence[TimedLine]) -> list[TimedLine]:
    """Return the lines of ``old`` before the position at which ``new`` begins; none if lines have no positions."""
    if not new:
        return [*old]
    begin = next((item.line.position for item in new if item.line.position is not None), None)
    positions = list[tuple[float, int]]()
    for item in old:
        positions.append(item.line.position or (positions[-1] if positions else (0, 0)))
    if begin is None or positions != sorted(positions):
        return []
    return [item for item, position in zip(old, positions, strict=True) if position < begin]


def _steps_per_epoch(folders: Sequence[Path]) -> float | None:
    """Return the steps of an epoch from the newest trainer_state.json of transformers; None if there is none."""
    states = [path for folder in folders for path in folder.rglob("trainer_state.json")]
    try:
        state = json.loads(max(states, key=lambda path: path.stat().st_mtime_ns).read_text(encoding="utf-8"))
        return float(state["global_step"] / state["epoch"])
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):  # ValueError: also of no states
        return None


def _rows_with_steps(items: Sequence[TimedLine], steps_per_epoch: float | None) -> Iterator[Row]:
    """Yield a row for each line, with a step for it. There are five ways to number the lines; the first that all lines
    have and that never falls is used: the step in the line; epochs passed × steps of an epoch; epoch and step; the
    epoch; the count of lines.
    """
    lines = _with_positions(item.line for item in items)
    # Does the step begin anew in each epoch? Then it is smaller in the first line of the next epoch, or equal if each
    # epoch has only one line, such as that of its last step.
    counts_anew_in_each_epoch = any(
        old.epoch != new.epoch and (old.step or 0) >= (new.step or 0) for old, new in itertools.pairwise(lines)
    )
    steps_of_epoch = max((line.steps_in_epoch for line in lines if line.steps_in_epoch), default=0)

    steps = [line.step for line in lines if line.step is not None and not counts_anew_in_each_epoch]
    known_epochs = [(line, line.epoch) for line in lines if line.epoch is not None]
    passed = [line.epochs_passed * (steps_per_epoch or 0) for line in lines if line.epochs_passed is not None]
    epochs_and_steps = [epoch * steps_of_epoch + (line.step or 0) for line, epoch in known_epochs]
    epochs = [epoch for line, epoch in known_epochs if line.epochs_passed is None or line.epochs_passed.is_integer()]
    candidates = (
        steps,
        [*map(round, passed)] if steps_per_epoch else [],
        epochs_and_steps if steps_of_epoch else [],
        epochs,
        [*range(1, len(lines) + 1)],
    )
    numbers = next(steps for steps in candidates if len(steps) == len(lines) and steps == sorted(steps))
    for item, line, number in zip(items, lines, numbers, strict=True):
        yield Row(time_s=item.time_s, step=number, epoch=line.epoch, metrics=dict(line.metrics))


def _with_positions(lines: Iterable[PrintedLine]) -> list[PrintedLine]:
    """Give each line without a position, such as an evaluation behind an epoch, the position of the line before."""
    placed: list[PrintedLine] = []
    for line in lines:
        before = placed[-1] if placed else PrintedLine({})
        if line.epoch is None:
            line = replace(line, epoch=before.epoch, epochs_passed=before.epochs_passed)
        if line.step is None and line.epoch == before.epoch:
            line = replace(line, step=before.step, steps_in_epoch=before.steps_in_epoch)
        placed.append(line)
    return placed


_KINDS = {  # a name with one of these parts is a metric
    *("acc", "acc1", "acc5", "accuracy", "prec", "prec1", "prec5", "auc", "auroc", "f1", "precision", "recall"),
    *("score", "top1", "top5", "iou", "miou", "map"),
    *("loss", "lr", "mae", "mse", "rmse", "r2", "ppl", "perplexity", "bleu", "rouge", "rouge1", "rouge2", "rougel"),
    *("cer", "wer", "psnr", "ssim", "fid", "ndcg", "reward"),
}
_SPLITS = {  # word in a line → split in the metric's name
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
_MEANS = {"best", "ema", "smooth", "avg", "mean", "running", "total", "final", "last"}  # allowed beside a kind
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+\.\d+|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)"
_PAIR = re.compile(
    rf"(?:(?P<best>\bbest)[ ]+)?(?:{_SPLIT}[ ]+)?(?:(?<![\w-])(?P<qualifier>[A-Za-z][\w-]*)[ ]+)?"
    # a name can begin at few places only, so that a long line without blanks is read once
    rf"(?<![\w/.@?&-])['\"]?(?P<name>[A-Za-z][\w/.@-]*)['\"]?"
    rf"(?P<between>\s*[:=]\s*|\s*[│┃|]\s*|[ ]+)(?:['\"]|(?:tensor|array|[\w.]*float\d+)\()?"
    # the end keeps out the percentage of tqdm's bar (``acc: 45%|###``) and the old value before an arrow (0.5 -> 0.6)
    rf"(?P<number>{_NUMBER})(?:/(?P<whole>\d+))?(?![\w.]*\w|[,:-]\d|/|\s*(?:%\s*\||->|→|=>))",
    re.IGNORECASE,
)
_OF_MODEL = re.compile(
    rf"\b(?P<name>accuracy|loss) of (?:the|our) [\w-]+ on (?:the )?(?:[\d,]+ )?{_SPLIT} [a-z]+\s*:", re.IGNORECASE
)
"""``Accuracy of the network on the 10000 test images: 55 %``, as PyTorch's tutorials print it."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST_CHARACTERS = 4_000  # a longer line is not meant for users
_SETTING_PARTS = {
    *("steps", "iters", "epochs", "size", "scale", "grad", "min", "max", "weight", "weights", "coef", "decay"),
    *("warmup", "smoothing", "threshold", "every", "freq", "interval", "patience", "target", "type", "fn"),
    *("function", "py", "txt", "json", "yaml", "yml", "csv", "log", "pt", "pth", "ckpt", "md", "so", "cpp", "cu"),
}
"""Parts of a name that make it a setting or a file: ``grad_acc``, ``map_size``, ``loss.py``."""
_SETTINGS = re.compile(
    r"\bNamespace\(|\b(?:config|args|arguments|hparams|hyper-?parameters|settings)\b\W{0,3}[:=({]", re.IGNORECASE
)
_FRACTIONS = {"acc", "accuracy", "score", "precision", "recall", "top1", "top5"}  # may be printed as 9908/10000
_BITS = {"8", "16", "32", "64"}  # values of a setting ``precision``
_FIRST_SPLIT = re.compile(rf"\W*{_SPLIT}", re.IGNORECASE)
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
_COUNTERS = (("at", "bar", "batch"), ("of", "length", "batches"))  # groups of _STEP_OF_EPOCH: the step, the steps
_EPOCH_AND_STEP = re.compile(r"\W*\[\s*(?P<epoch>\d+)\s*/\s*\d+\]\s*\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)\]")
"""``[0/25][17/600]`` at the beginning of a line."""
_SUMMARY = re.compile(r"\s*\*\s")
"""Begins a line that sums up the evaluation whose lines came before: ``* Acc@1 76.1``."""


@dataclass(frozen=True)
class PrintedLine:
    """One line with metrics, and what it says of its position."""

    metrics: Mapping[str, float]
    epoch: int | None = None
    step: int | None = None
    steps_in_epoch: int | None = None
    epochs_passed: float | None = None  # with a fraction
    split: str = ""  # train, val, … with which the line begins, or whose lines it sums up; '' without one

    @property
    def position(self) -> tuple[float, int] | None:
        """Epoch and step, by which lines can be ordered; None if it names neither."""
        if self.epochs_passed is not None:
            return self.epochs_passed, 0
        return None if self.epoch is None and self.step is None else (self.epoch or 0, self.step or 0)


def parse_line(text: str, split_before: str = "") -> PrintedLine:
    """Return a line's metrics, epoch and step. ``split_before``: of the line before, for a line that sums it up."""
    text = text.rpartition("\r")[2]  # the last state of a progress bar
    if len(text) > _LONGEST_CHARACTERS:
        return PrintedLine({})
    text = _COLOURS.sub("", text)
    if _SETTINGS.search(text):  # printed before the training
        return PrintedLine({})
    text = _OF_MODEL.sub(r"\g<split> \g<name>:", text)
    first = _FIRST_SPLIT.match(text)
    split = _SPLITS[first["split"].lower()] if first else split_before if _SUMMARY.match(text) else ""
    matches: dict[str, list[re.Match[str]]] = {}
    for match in _PAIR.finditer(text):
        if _is_metric(match):
            matches.setdefault(_name(match, split), []).append(match)
    pairs = [(name, pair) for name, alike in matches.items() for pair in _values_of(name, alike)]
    metrics = {new: value for name, (new, value) in pairs if new == name or new not in matches}
    if all(name.rpartition("/")[2] == "lr" for name in metrics):  # a setting, unless the line has a result
        metrics = {}
    if position := _EPOCH_AND_STEP.match(text):
        return PrintedLine(metrics, int(position["epoch"]), int(position["at"]), int(position["of"]), split=split)
    epoch, step = _EPOCH.search(text), _STEP.search(text)
    at, of = (step["at"], step["of"]) if step else (None, None)
    counts_other = epoch is None and split not in ("", "train")  # the batches of an evaluation
    inner = None if step or counts_other else _STEP_OF_EPOCH.search(text, epoch.end("at") if epoch else 0)
    if inner:
        at, of = (next(filter(None, inner.group(*names))) for names in _COUNTERS)
    if step is None and (passed := _EPOCHS.search(text)):
        epochs = float(passed["passed"])
        return PrintedLine(metrics, epoch=max(1, math.ceil(epochs)), epochs_passed=epochs, split=split)
    return PrintedLine(metrics, _int(epoch["at"] if epoch else None), _int(at), _int(of), split=split)


def _int(digits: str | None) -> int | None:
    return int(digits) if digits else None


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
    # train_loss 0.2, Acc@1 76.1, ema_acc 0.9
    is_name = all(part in _KINDS or part in _SPLITS or part in _MEANS or part.isdecimal() for part in parts)
    return is_name and (not number.isdecimal() or match["whole"] is not None)  # and not: map 3 workers


def _name(match: re.Match[str], split: str) -> str:
    """Return the metric's name: ``Loss`` behind ``Test`` is ``test/loss``; a name that contains a split stays."""
    name = match["name"].lower() if match["name"].istitle() or match["name"].isupper() else match["name"]
    qualifier = (match["qualifier"] or "").lower()
    name = f"{qualifier}_{name}" if qualifier in _QUALIFIERS else name
    name = f"best_{name}" if match["best"] and not name.startswith("best_") else name
    split = _SPLITS[match["split"].lower()] if match["split"] else _SPLITS.get(qualifier, split)
    return name if not split or not _SPLITS.keys().isdisjoint(re.split(r"[/_.-]+", name.lower())) else f"{split}/{name}"


def _values_of(name: str, matches: Sequence[re.Match[str]]) -> Iterator[tuple[str, float]]:
    """Yield the value of a name in a line. If the line has it several times, the words before it tell the values apart
    (``Last reward: 98  Average reward: 47``); where they don't differ, the values must be equal.
    """
    by_qualifier = {(match["qualifier"] or "").lower(): match for match in matches}
    is_labelled = all(match["between"].strip() for match in matches)  # not: loss 0.5 then loss 0.4
    if len(matches) > 1 and len(by_qualifier) == len(matches) and is_labelled:
        split, slash, last = name.rpartition("/")
        for word, match in by_qualifier.items():
            yield f"{split}{slash}{word}_{last}" if word else name, _value(match)
    elif len({_value(match) for match in matches}) == 1:
        yield name, _value(matches[0])


def _value(match: re.Match[str]) -> float:
    """Return the number; ``9908/10000`` is a fraction."""
    number, whole = float(match["number"].replace(",", "")), match["whole"]
    return number / int(whole) if whole and int(whole) else number
