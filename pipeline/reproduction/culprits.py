"""Why a run that was killed and resumed has other results than an undisturbed one: the analysis of `doit prove`.

``gather`` compares the folders of a run and of its killed repetition (code, checkpoints, metrics, files); ``culprit``
draws the conclusion, such as "optimizer state missing". Nothing is unpickled: checkpoints are only searched for names.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any

from pipeline.core.specs import State
from pipeline.reproduction.compare import Verdict, is_time
from pipeline.runs import journal, metrics_file
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

OPTIMIZER, RANDOM, SCHEDULE = "optimizer", "random", "schedule"
"""The kinds of state that a checkpoint may hold; RANDOM are the states of random number generators."""
_TIME_TEXT = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d(:\d\d(\.\d+)?)?|\b1[5-9]\d{8}(\.\d+)?\b")
"""Matches a date, a time of day, or a unix time."""
_SETS_RANDOM = re.compile(r"set_rng_state|(?<![_\w])set_?state\(")
_GENERATORS = {
    "python's random": (r"(?<![.\w])random\.(?!seed|[gs]etstate|Random)[a-z]\w*\(", r"(?<![.\w])random\.setstate\("),
    "numpy's random": (
        r"\b(?:np|numpy)\.random\.(?!seed|[gs]et_state|default_rng)[a-z]\w*\(",
        r"\b(?:np|numpy)\.random\.set_state\(",
    ),
}
"""Global random number generator → (pattern of calls that draw from it, pattern of calls that restore its state)."""
_TRAINING_LIBRARY = re.compile(r"^\s*(?:import|from)\s+(?:transformers|accelerate|lightning)\b", re.MULTILINE)
_LOADING_CALL = re.compile(r"^.*?(\w+)\.load_state_dict\(.*$", re.MULTILINE)
_STATE_NAMES = {OPTIMIZER: re.compile(r"(?i)\bopt|optim"), SCHEDULE: re.compile(r"(?i)sched|\blr_")}
"""Kind of state → what a call that loads it contains, as in ``optimizer.load_state_dict(…)``."""
# optimizers with a state of their own; torch's SGD without momentum has none
_KEEPS_STATE = re.compile(r"momentum|Adam|Ada(?:grad|delta|factor)|RMSprop|Rprop|LBFGS|Lion|Muon|create_optimizer")
_SCHEDULER = re.compile(r"lr_scheduler|LRScheduler|(?:Step|Lambda|Cycle|Annealing|Plateau|Exponential|Polynomial)LR\b")


class Culprit(Enum):
    """What makes the results of a killed run differ: the finding, and how to fix it."""

    def __init__(self, finding: str, mend: str) -> None:
        self.finding, self.mend = finding, mend

    NO_CHECKPOINT = (
        "no checkpoint was found after a kill, and starting over gave other results",
        "save into {checkpoints} (paceline.checkpoints()), and write results anew instead of adding to them",
    )
    NOT_READ = (
        "a checkpoint was found and not read: it began again at its first step",
        "load what {resume} stands for; docs/script-files.md says where it is looked for",
    )
    OPTIMIZER = ("optimizer state missing", "save optimizer.state_dict() in the checkpoint, and load it")
    RANDOM = (
        "random state not restored (order of data, dropout and augmentation follow from it)",
        "save and restore torch.get_rng_state(), CUDA's, numpy's and random's, of each rank, or seed by step",
    )
    OPTIMIZER_AND_RANDOM = (
        "optimizer state and random state missing; the metrics don't show which of them made the difference",
        "save and restore optimizer.state_dict(), and torch.get_rng_state(), CUDA's, numpy's and random's",
    )
    ORDER = (
        "order of data differs after the resume, or steps were done twice",
        "go on behind the last step that the checkpoint holds (its epoch + 1; inside an epoch skip the batches that "
        "were seen), and draw the order from seed and epoch",
    )
    ORDER_OR_RANKS = (
        "order of data differs after the resume, steps were done twice, or another rank's random state isn't restored; "
        "metrics of each step would tell",
        "go on behind the last step that the checkpoint holds, draw the order from seed and epoch, and save and "
        "restore the random states of each rank",
    )
    NOT_LOGGED = (
        "metrics of the last step are missing: it went on behind them, and had nothing left to train",
        "evaluate and log once more at the end of the script, whatever was trained before",
    )
    OTHER_END = (
        "it ended at another step, and the steps of both are equal: what decides when to end isn't restored",
        "save what the end depends on in the checkpoint (a counter of patience, the best value, the time used)",
    )
    SINCE_RESUME = (
        "a metric of the whole training counts from the resume on: nothing else differs",
        "keep its sum in the checkpoint; program.ignore_metrics=[NAME] leaves it out",
    )
    TIME_OR_PATH = (
        "a time or a path in the output: metrics and tensors are equal",
        "leave times and absolute paths out of results",
    )
    SCHEDULE = (
        "the schedule of the learning rate isn't restored",
        "save scheduler.state_dict() in the checkpoint, and load it",
    )
    NOT_SHOWN = (
        "tensors differ, and no metric does: a state that no metric shows isn't restored (an average of the weights, a "
        "buffer), or steps were done twice",
        "save and load all that the loop changes; go on behind the last step that the checkpoint holds",
    )
    CHANCE = (
        "it isn't deterministic: undisturbed too it comes out otherwise",
        "seed everything that is drawn; torch.use_deterministic_algorithms(True) names operations that aren't",
    )
    UNKNOWN = ("not known from what it left", "compare both folders")


STATES = frozenset(
    {Culprit.OPTIMIZER, Culprit.RANDOM, Culprit.OPTIMIZER_AND_RANDOM, Culprit.SCHEDULE, Culprit.NOT_SHOWN}
)
"""The culprits that are a state which the checkpoint lacks. It may lack more states than the one that is named."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill of an attempt."""

    after_s: float  # seconds since the attempt began
    checkpoint: str | None  # the path in the run folder of the newest one at that moment
    holds: frozenset[str] = frozenset()  # the kinds of state in this checkpoint (``state_kinds``)


@dataclass(frozen=True, kw_only=True)
class Code:
    """What the code of a run restores after a kill, as far as the names in it show.

    Attributes:
        loads: the kinds of state that a call of ``load_state_dict`` names.
        forgets: the kinds that the code has and no such call names, although calls for other kinds exist.
        unrestored: the global random number generators that the code draws from and never restores.
    """

    restores_random: bool = False
    loads: frozenset[str] = frozenset()
    forgets: frozenset[str] = frozenset()
    unrestored: tuple[str, ...] = ()
    has_optimizer_state: bool = True  # False: torch's SGD without momentum alone, which has none
    has_schedule: bool = False

    @classmethod
    def read(cls, folder: Path) -> Code:
        """Search all sources below ``folder``."""
        text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("*.py"))
        has_schedule = _SCHEDULER.search(text) is not None
        if _TRAINING_LIBRARY.search(text):  # its trainer restores all states
            return cls(restores_random=True, loads=frozenset({OPTIMIZER, SCHEDULE}), has_schedule=has_schedule)
        has_optimizer_state = "SGD(" not in text or _KEEPS_STATE.search(text) is not None
        calls = [*_LOADING_CALL.finditer(text)]
        loads = frozenset(kind for kind, name in _STATE_NAMES.items() if any(name.search(call[0]) for call in calls))
        # `for part in (model, optimizer): part.load_state_dict(…)` names no kind and may load all of them
        in_loop = any(re.search(rf"\bfor\b.*\b{call[1]}\b.*\bin\b", text) for call in calls)
        has = {kind for kind, exists in ((OPTIMIZER, has_optimizer_state), (SCHEDULE, has_schedule)) if exists}
        return cls(
            restores_random=_SETS_RANDOM.search(text) is not None,
            loads=loads,
            forgets=frozenset(has - loads) if calls and not in_loop else frozenset(),
            unrestored=tuple(
                name
                for name, (draws, restores) in _GENERATORS.items()
                if re.search(draws, text) and not re.search(restores, text)
            ),
            has_optimizer_state=has_optimizer_state,
            has_schedule=has_schedule,
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a run and its repetition, which was killed, differ."""

    kills: tuple[Kill, ...]  # of the repetition
    resumed_at: tuple[int, ...] = ()  # the first step that each attempt after the first one logged, if it logged any
    differs_at: int | None = None  # the first step whose metrics differ
    started_over: bool = False  # the last attempt began at the run's first step
    lacks_last: bool = False  # the only difference is that metrics of the last step are missing
    ended_elsewhere: bool = False  # the last steps of both differ, and no step before
    only_totals: bool = False  # the only differences are in metrics that are logged once, at the end
    # a metric that both logged at a step has another value. The first row after a resume doesn't count: a mean since
    # the row before it (transformers' loss) is over fewer steps there
    values_differ: bool = False
    tensors_differ: tuple[str, ...] = ()  # undeclared files of the script whose tensors differ
    files_alone: bool = False  # the metrics of all steps are equal, and files differ only in times and paths
    is_dense: bool = False  # the run logged metrics at every step, not only at every epoch
    ranks: int = 1  # the number of ranks of the run
    code: Code = field(default_factory=Code)

    @property
    def reads_nothing(self) -> bool:
        """True if the script starts over without reading its checkpoint: otherwise some value would differ."""
        return self.started_over and not self.values_differ

    @property
    def lacks(self) -> list[str]:
        """The kinds of state that the code has and that the checkpoint of at least one kill lacked."""
        exists = {OPTIMIZER: self.code.has_optimizer_state, RANDOM: True, SCHEDULE: self.code.has_schedule}
        saved = [kill.holds for kill in self.kills if kill.checkpoint is not None]
        return [kind for kind in exists if exists[kind] and not all(kind in holds for holds in saved)]

    @property
    def is_equal(self) -> bool:
        """True if no value of a step and no tensor differs, whatever the results at the end say."""
        return not self.values_differ and not self.tensors_differ


def gather(folder: RunFolder, again: RunFolder, verdict: Verdict, kills: Sequence[Kill]) -> Evidence:
    """Compare a run's folder with that of its repetition ``again``; ``verdict`` is the comparison of their results."""
    rows = metrics_file.rows(folder.path / run_folder.METRICS)
    before = _metrics_by_step(rows, verdict.times)
    after = _metrics_by_step(metrics_file.rows(again.path / run_folder.METRICS), verdict.times)
    steps = sorted({*before, *after})
    differs_at = next((step for step in steps if repr(before.get(step)) != repr(after.get(step))), None)
    are_files = all(item.field.startswith(f"{run_folder.OUTPUTS}/") for item in verdict.outcome)
    attempts = rows_by_attempt(again.path)
    resumed = resumed_at(first_steps(attempts))
    last = {row.step for row in attempts[-1]} if len(attempts) > 1 else set[int]()
    # the first row after a resume is left out, see Evidence.values_differ
    values_differ = any(_values_differ(before[step], after[step]) for step in before.keys() & after.keys() - {*resumed})
    ended_elsewhere = bool(before and after and differs_at is not None) and max(before) != max(after)
    ended_elsewhere = ended_elsewhere and (differs_at or 0) > min(max(before), max(after))
    result = again.read_result()
    return Evidence(
        kills=tuple(kills),
        resumed_at=resumed,
        differs_at=differs_at,
        started_over=bool(before and last) and min(last) <= min(before) and len(last) >= len(before) / 2,
        lacks_last=_lacks_last(before, after) or (ended_elsewhere and max(after) < max(before) and not last),
        ended_elsewhere=ended_elsewhere,
        only_totals=_only_totals(before, verdict),
        values_differ=values_differ,
        tensors_differ=tuple(name for name in verdict.besides_differing if _tensors_differ(folder, again, name)),
        files_alone=differs_at is None and are_files and _differ_by_times(folder, again, verdict),
        is_dense=bool(before) and [*before] == [*range(min(before), max(before) + 1)] and not _are_epochs(rows),
        ranks=sum(result.nproc_per_node) if result is not None else 1,
        code=Code.read(again.code),
    )


def culprit(evidence: Evidence) -> Culprit:
    """Return what made the results differ.

    Wrong weights, order of data or random state show in the loss of the first step after a resume, a missing state of
    the optimizer one step later. If not every step is logged, the names in the checkpoint decide."""
    code = evidence.code
    # causes that can be seen without the checkpoint
    if evidence.files_alone and not evidence.tensors_differ:
        return Culprit.TIME_OR_PATH
    if not evidence.kills:
        return Culprit.CHANCE
    if evidence.lacks_last:
        return Culprit.NOT_LOGGED
    if evidence.only_totals:
        return Culprit.SINCE_RESUME
    if all(kill.checkpoint is None for kill in evidence.kills):
        return Culprit.NO_CHECKPOINT
    if evidence.reads_nothing:
        return Culprit.NOT_READ
    if evidence.ended_elsewhere:
        return Culprit.OTHER_END
    # the distance from a resume to the first difference
    lacks, differs_at, is_dense = evidence.lacks, evidence.differs_at, evidence.is_dense
    steps_behind = {differs_at - step for step in evidence.resumed_at} if differs_at is not None else set[int]()
    shows_at_once = is_dense and 0 in steps_behind
    lacks_schedule = SCHEDULE in lacks or SCHEDULE in code.forgets
    if is_dense and 1 in steps_behind and not shows_at_once:
        if OPTIMIZER in lacks or OPTIMIZER not in code.loads:
            return Culprit.OPTIMIZER
        if lacks_schedule:
            return Culprit.SCHEDULE
        # a random state that another rank lacks shows only one step later in the loss of rank 0
        return Culprit.RANDOM if evidence.ranks > 1 else Culprit.OPTIMIZER
    # the distance doesn't tell: decide by what the checkpoint and the code lack
    if OPTIMIZER in lacks and not shows_at_once:
        return Culprit.OPTIMIZER_AND_RANDOM if RANDOM in lacks else Culprit.OPTIMIZER
    if differs_at is None and evidence.tensors_differ:
        return Culprit.NOT_SHOWN
    if RANDOM in lacks or not code.restores_random or code.unrestored:
        return Culprit.RANDOM
    if OPTIMIZER in code.forgets and not shows_at_once:
        return Culprit.OPTIMIZER
    if lacks_schedule:
        return Culprit.SCHEDULE
    if differs_at is None:
        return Culprit.UNKNOWN
    return Culprit.ORDER if is_dense or evidence.ranks == 1 else Culprit.ORDER_OR_RANKS


# ------------------------------------------------------------------------------------------- metrics by step
def _metrics_by_step(rows: Iterable[metrics_file.MetricsRow], ignored: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return step → metrics in the order of steps, without times; of a step that was logged twice, the later values."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        values = {name: value for name, value in row.metrics.items() if name not in ignored and not is_time(name)}
        steps[row.step] = {**steps.get(row.step, {}), **values}
    return dict(sorted(steps.items()))


def _are_epochs(rows: Iterable[metrics_file.MetricsRow]) -> bool:
    """Return True if the steps are numbers of epochs: the script prints a line for each epoch."""
    return all(row.step == row.epoch for row in rows)


def _values_differ(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return any(repr(first[name]) != repr(second[name]) for name in first.keys() & second.keys())


def _lacks_last(first: Mapping[int, Mapping[str, float]], second: Mapping[int, Mapping[str, float]]) -> bool:
    """Return True if ``second`` equals ``first`` except that it lacks metrics of the last step."""
    if not first or [*first] != [*second]:
        return False
    *steps, last = first
    return all(first[step] == second[step] for step in steps) and second[last].items() < first[last].items()


def _only_totals(steps: Mapping[int, Mapping[str, float]], verdict: Verdict) -> bool:
    """Return True if only metrics differ that were logged once, at the last step."""
    if not steps or not verdict.outcome:
        return False
    *before, last = steps.values()
    return all(item.field in last and not any(item.field in metrics for metrics in before) for item in verdict.outcome)


def rows_by_attempt(run_dir: Path) -> list[list[metrics_file.MetricsRow]]:
    """Return the rows of each attempt; an attempt has none if a later one repeated all of its steps."""
    entries = journal.read(run_dir / run_folder.JOURNAL)
    start_times = {entry.attempt: entry.time for entry in entries if entry.state is State.RUNNING}
    by_attempt: dict[int, list[metrics_file.MetricsRow]] = {number: [] for number in sorted(start_times)}
    for row in metrics_file.rows(run_dir / run_folder.METRICS):
        # by its time, or by the id of its attempt if that is an earlier one: a row may be recorded late
        candidates = [number for number, start in start_times.items() if start <= row.time_s]
        if row.attempt_number is not None:
            candidates = [number for number in candidates if number <= row.attempt_number]
        if candidates:
            by_attempt[max(candidates)].append(row)
    return list(by_attempt.values())


def first_steps(attempts: Sequence[Sequence[metrics_file.MetricsRow]]) -> list[int | None]:
    """Return the first step of each attempt of ``rows_by_attempt``; None for an attempt without rows."""
    return [min((row.step for row in rows), default=None) for rows in attempts]


def resumed_at(starts: Sequence[int | None]) -> tuple[int, ...]:
    """Return the ``first_steps`` of attempts that resumed: an attempt from the run's first step on has started over."""
    known = [step for step in starts if step is not None]
    return tuple(step for step in starts[1:] if step is not None and step > min(known))


# --------------------------------------------------------------------------------------------------- files
def _differ_by_times(folder: RunFolder, again: RunFolder, verdict: Verdict) -> bool:
    """Return True if each differing file has equal tensors, or text that is equal but for times and paths."""
    for item in verdict.outcome:
        before, after = (_content_without_times(run.path, item.field) for run in (folder, again))
        if before is None or before != after:
            return False
    return True


def _content_without_times(run_dir: Path, name: str) -> object:
    """Return a file's tensors, or its text without times and paths; None for another kind of file."""
    if (tensors := tensors_in(run_dir / name)) is not None:
        return tensors
    try:
        text = (run_dir / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return _TIME_TEXT.sub("TIME", text.replace(str(run_dir.resolve()), "{run}"))


def _tensors_differ(folder: RunFolder, again: RunFolder, name: str) -> bool:
    """Return True if both are files of ``torch.save`` and their tensors differ, random states aside."""
    before, after = (tensors_in(run.path / name, random_states=False) for run in (folder, again))
    return before is not None and after is not None and before != after


# ----------------------------------------------------------------------------- what a checkpoint holds
_LARGEST_PICKLE_BYTES = 64 << 20  # the pickle of a checkpoint with a million tensors
_ZIP = b"PK\x03\x04"  # the first bytes of a zip archive, which torch.save writes
# kind of state → names of its entries in a checkpoint
_STATE_TEXTS = {
    SCHEDULE: re.compile(r"(?i)sched|^_?last_(?:epoch|lr)$|^_step_count$"),
    OPTIMIZER: re.compile(r"(?i)optim|exp_avg|momentum|max_exp_avg_sq"),
    # not random, train_size_random_mix and random_erase, arguments that a checkpoint holds as well
    RANDOM: re.compile(
        r"(?i)(?<![a-z])rng|rand(?:om)?_?states?(?![a-z])|(?:python|numpy|np|torch|cuda)[_.]?random$|generator|\bseed_state"
    ),
}


def state_kinds(path: Path) -> frozenset[str]:
    """Return the kinds of state (OPTIMIZER, RANDOM, SCHEDULE) that a checkpoint, a file or a folder, names."""
    texts = [*_texts(path)]
    return frozenset(kind for kind, pattern in _STATE_TEXTS.items() if any(map(pattern.search, texts)))


def tensors_in(path: Path, *, random_states: bool = True) -> list[tuple[int, int]] | None:
    """Return size and CRC-32 of each tensor's bytes in a file of ``torch.save`` or safetensors; None for another file.

    ``random_states``: tensors of bytes count as well.
    """
    try:
        if path.suffix == ".safetensors":
            return _tensors_of_safetensors(path)
        with zipfile.ZipFile(path) as archive:
            left_out = set() if random_states else _storages_of_bytes(archive)  # tensors of bytes are random states
            members = (member for member in archive.infolist() if "/data/" in member.filename)
            return [(one.file_size, one.CRC) for one in members if one.filename.rpartition("/")[2] not in left_out]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return None


def _tensors_of_safetensors(path: Path) -> list[tuple[int, int]]:
    """Return size and CRC-32 of each tensor, sorted by name. The file's metadata may hold a time. Raises ValueError."""
    with path.open("rb") as file:
        header = _safetensors_header(file)
        data_begins, tensors = file.tell(), list[tuple[int, int]]()
        for _, entry in sorted((name, entry) for name, entry in header.items() if name != "__metadata__"):
            begin, end = entry["data_offsets"]
            file.seek(data_begins + begin)
            tensors.append((end - begin, zlib.crc32(file.read(end - begin))))
        return tensors


def _safetensors_header(file: IO[bytes]) -> Any:
    """Read the header, JSON behind its length of 8 bytes; the tensors' bytes follow. Raises ValueError."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _LARGEST_PICKLE_BYTES:
        raise ValueError(f"a header of {header_bytes} bytes")
    return json.loads(file.read(header_bytes))


def _storages_of_bytes(archive: zipfile.ZipFile) -> set[str]:
    """Return the storage keys of tensors of bytes. Raises ValueError: too large, or no file of ``torch.save``."""
    (pickled,) = [member for member in archive.infolist() if member.filename.endswith("/data.pkl")]
    if pickled.file_size > _LARGEST_PICKLE_BYTES:
        raise ValueError(pickled.filename)
    with archive.open(pickled) as file:
        return {key for key, kind in _storages(file).items() if kind == "torch ByteStorage"}


def _storages(file: IO[bytes]) -> dict[str, str]:
    """Return key → type (``torch FloatStorage``) of the storages in a pickle of ``torch.save``. Raises ValueError."""
    # A storage is written as a persistent id: its type, its key, and more (torch/serialization.py). A text that was
    # written before is fetched from the pickle's memo.
    memo, last, kind = dict[int, str](), "", ""
    type_by_key = dict[str, str]()
    for opcode, value, _ in pickletools.genops(file):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[int(value or 0)] = last
            continue
        if opcode.name in ("BINGET", "LONG_BINGET"):
            last = memo.get(int(value or 0), "")
        else:
            last = value if isinstance(value, str) else ""
        if kind and last:  # the text after a type is the key
            type_by_key[last], kind = kind, ""
        elif last.startswith("torch ") and last.endswith("Storage"):
            kind = last
    return type_by_key


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts in a checkpoint that may name a part of it; none of an incomplete file, or of another format."""
    if path.is_dir():
        for inside in sorted(path.rglob("*")):
            yield inside.name
            if inside.is_file():
                yield from _texts(inside)
        return
    with suppress(OSError, ValueError, zipfile.BadZipFile), path.open("rb") as file:
        head = file.read(8)
        file.seek(0)
        if head.startswith(_ZIP):  # torch.save since 1.6: the texts in its pickle
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    if member.filename.endswith("data.pkl") and member.file_size <= _LARGEST_PICKLE_BYTES:
                        with archive.open(member) as pickled:
                            yield from (value for _, value, _ in pickletools.genops(pickled) if isinstance(value, str))
        elif path.suffix == ".safetensors":
            yield from _safetensors_header(file)
        elif head.startswith(b"\x80"):  # a plain pickle, as of older versions of torch.save
            yield from (value for _, value, _ in pickletools.genops(file) if isinstance(value, str))
