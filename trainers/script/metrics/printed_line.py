"""The metrics in one line that a script prints, with the epoch and step that the line names.

A word counts as a metric if one of its parts is in ``_KINDS`` and a number follows: ``loss: 0.31``, ``val_acc=0.91``,
``loss 0.31``, ``{'loss': 0.31}``, ``Test set: Average loss: 0.03, Accuracy: 9908/10000``, a progress bar's
``loss=0.31``, ``│ test_acc │ 0.91 │`` of a table. docs/own-scripts.md lists the forms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

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
_LONGEST_CHARACTERS = 4_000  # characters; a longer line is not meant for users
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
_COUNTERS = (("at", "bar", "batch"), ("of", "length", "batches"))
_EPOCH_AND_STEP = re.compile(r"\W*\[\s*(?P<epoch>\d+)\s*/\s*\d+\]\s*\[\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)\]")
"""``[0/25][17/600]`` at the beginning of a line."""
_SUMMARY = re.compile(r"\s*\*\s")
"""Begins a line that sums up the evaluation whose lines came before: ``* Acc@1 76.1``."""


@dataclass(frozen=True)
class PrintedLine:
    """One line with metrics.

    Attributes:
        epoch: the epoch that it names; of a line with ``epochs`` the one under way.
        step: of ``steps`` in its epoch, or of the run; None: not in the line.
        epochs: how many epochs have passed, of a line that has it with a fraction.
        split: train, val, … with which the line begins, or whose lines it sums up; '' without one.
    """

    metrics: Mapping[str, float]
    epoch: int | None = None
    step: int | None = None
    steps: int | None = None
    epochs: float | None = None
    split: str = ""

    @property
    def position(self) -> tuple[float, int] | None:
        """Epoch and step, by which lines can be ordered; None if it names neither."""
        if self.epochs is not None:
            return self.epochs, 0
        return None if self.epoch is None and self.step is None else (self.epoch or 0, self.step or 0)


def parse_line(text: str, split_before: str = "") -> PrintedLine:
    """Return the metrics of one line, and its epoch and step. A name with two different values is left out.

    Args:
        split_before: of the line with metrics before it, which a line that begins with a star sums up.
    """
    if len(text) > _LONGEST_CHARACTERS:
        return PrintedLine({})
    text = _COLOURS.sub("", text)
    if _SETTINGS.search(text):  # printed before the training
        return PrintedLine({})
    first = _FIRST_SPLIT.match(text)
    split = _SPLITS[first["split"].lower()] if first else split_before if _SUMMARY.match(text) else ""
    values: dict[str, set[float]] = {}
    for match in _PAIR.finditer(text):
        if _is_metric(match):
            values.setdefault(_name(match, split), set()).add(_value(match))
    metrics = {name: numbers.pop() for name, numbers in values.items() if len(numbers) == 1}
    if all(name.rpartition("/")[2] == "lr" for name in metrics):  # a setting, unless the line has a result
        metrics = {}
    if both := _EPOCH_AND_STEP.match(text):
        return PrintedLine(metrics, int(both["epoch"]), int(both["at"]), int(both["of"]), split=split)
    epoch, step = _EPOCH.search(text), _STEP.search(text)
    at, of = (step["at"], step["of"]) if step else (None, None)
    counts_other = epoch is None and split not in ("", "train")  # the batches of an evaluation
    inner = None if step or counts_other else _STEP_OF_EPOCH.search(text, epoch.end("at") if epoch else 0)
    if inner:
        at, of = (next(filter(None, inner.group(*names))) for names in _COUNTERS)
    if step is None and (passed := _EPOCHS.search(text)):
        epochs = float(passed["passed"])
        return PrintedLine(metrics, epoch=max(1, math.ceil(epochs)), epochs=epochs, split=split)
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
