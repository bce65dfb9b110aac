"""The Python API for notebooks and programs, which ``import paceline`` offers: list, read, compare and start runs.

``train`` and ``sweep`` run the commands of these names in child processes; the other functions read run folders here.
docs/notebook.md has examples.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from pipeline.cli.commands import compare as choosing
from pipeline.cli.commands import runs as listing
from pipeline.cli.invocation import Invocation, is_override
from pipeline.cli.output import Failure, is_event, read_envelope
from pipeline.cli.session import ROOT, Session
from pipeline.comparing import comparison as tables
from pipeline.comparing import curves, drawing
from pipeline.comparing.comparison import Comparison as Differences
from pipeline.comparing.comparison import compare as compared
from pipeline.comparing.curves import FORMATS
from pipeline.core.errors import PacelineError, suggestion
from pipeline.core.errors import UsageError as UsageError
from pipeline.core.files import write_atomic
from pipeline.core.printable import hydra_text, hydra_value
from pipeline.core.processes import process, threads
from pipeline.core.specs import LAST
from pipeline.core.tables import duration, quantity
from pipeline.execution.exported import exported_file
from pipeline.runs import index
from pipeline.runs import status as run_status
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import RunRow
from pipeline.sweep.results import DEFAULT_METRIC, MAXIMIZE, MINIMIZE
from trainers.contract import run_folder

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# whole names of fields or groups; any other name without a dot is looked up as the last part of a field
_GROUPS = ("cluster", "dataset", "experiment", "init", "model", "optimizer", "program", "schedule", "search", "seed")
_QUOTED_OR_LISTED = re.compile(r"['\"\[\]{}()]")
_SCRIPT_VERBS = ("run", "torchrun")  # the first words of a line that starts a script


class CommandError(Exception):
    """The error of a command that failed, with ``code`` and ``hint`` of its JSON answer (docs/json.md)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message if failure.hint is None else f"{failure.message}\n  try: {failure.hint}")
        self.code, self.hint = failure.code, failure.hint


def train(*overrides: str, quiet: bool = False, **fields: Any) -> Run:
    """Train a run to its end, or return it at once if it is finished: what `doit train` does.

    Args:
        overrides: as on the command line, ``"experiment=quickstart"``, ``"optimizer.lr=0.1"``; or the line that starts
            a script, ``"run train.py --epochs 3"`` or ``"torchrun --nproc-per-node 2 train.py"``.
        quiet: print nothing.
        fields: overrides with values of Python: ``seed=3``, ``model="resnet18"``, ``optimizer__lr=0.1``. A name that is
            the last part of exactly one field means this one: ``lr=0.1``. With a script's line, the script's options.

    Raises:
        CommandError: the training failed, or an override is wrong.
        KeyboardInterrupt: it was interrupted. The run is KILLED, and the same call goes on with it.
    """
    typed = _words(overrides)
    words = _script_line(typed, fields) or [*typed, *_overrides(fields, typed)]
    result = run_verb("train", words, quiet=quiet)
    return Run(key=str(result["key"]), path=Path(result["folder"]))


def sweep(*overrides: str, quiet: bool = False, **fields: Any) -> Any:
    """Train every combination of values, as `doit sweep` does.

    Args:
        overrides: as on the command line, ``"optimizer.lr=0.1,0.01"``, ``"seed=range(3)"``; or a script's line.
        quiet: print nothing.
        fields: as for ``train``; a list has the values of trials: ``lr=[0.1, 0.01]``.

    Returns:
        One row a trial, best first: a pandas DataFrame, or a list of dicts where pandas isn't installed.

    Raises:
        CommandError: trials have failed; `paceline.runs(state="FAILED")` lists them.
        KeyboardInterrupt: it was interrupted; the same call goes on.
    """
    typed = _words(overrides)
    words = _script_line(typed, fields) or [*typed, *_overrides(fields, typed, sweeps=True)]
    swept = run_verb("sweep", words, quiet=quiet)
    best = swept["best"] or {"by": DEFAULT_METRIC, "direction": MAXIMIZE}
    trials = [Trial(**{name: trial[name] for name in Trial._fields}) for trial in swept["trials"]]
    return table([trial.as_row() for trial in _best_first(trials, best["by"], best["direction"])])


class Trial(NamedTuple):
    """A trial of `doit sweep --json`."""

    key: str
    state: str
    chosen: Sequence[str]  # the overrides in which it differs from the others
    values: Mapping[str, Any]  # its metrics and speeds

    def as_row(self) -> dict[str, Any]:
        fields = (word.lstrip("+").partition("=") for word in self.chosen)
        return {**{name: value for name, _, value in fields}, **self.values, "state": self.state, "key": self.key}


def _best_first(trials: Sequence[Trial], metric: str, direction: str) -> list[Trial]:
    def order(trial: Trial) -> tuple[bool, float]:
        value = float(trial.values.get(metric, math.nan))  # JSON has the text "inf" for that number
        return math.isnan(value), value if direction == MINIMIZE else -value  # without a value: last

    return sorted(trials, key=order)


# ------------------------------------------------------------------------------------------ one command
def run_verb(verb: str, words: Sequence[str], *, quiet: bool = False) -> Any:
    """Run `doit VERB WORDS`, print its progress, and return the data of its JSON answer. Raises CommandError."""
    starts_script = bool(words) and words[0] in _SCRIPT_VERBS
    # behind the script, --json would be an argument of the script
    typed = [words[0], "--json", *words[1:]] if starts_script else [*words, "json=1"]
    argv = [sys.executable, "-m", "pipeline.cli.main", verb, *typed]
    with Path(os.devnull).open("rb") as nothing:
        child = process.stream(argv, stdin=nothing, env=process.child_environment())
    assert child.stdout is not None
    assert child.stderr is not None
    progress = threads.start(_print_progress, child.stderr, quiet, name="progress", on_error=lambda _: None)
    try:
        stdout = b"".join(line for line in child.stdout if not is_event(line))
        child.wait()
    except BaseException:  # the user interrupts the cell
        child.send_signal(signal.SIGINT)
        child.wait()  # the command records its run as KILLED
        raise
    finally:
        progress.join()
        child.stdout.close()
    try:
        answered = read_envelope(stdout, child.returncode)
    except PacelineError as error:
        raise CommandError(Failure.of(error)) from error
    if answered["error"]:
        raise CommandError(Failure(**answered["error"]))
    return answered["data"]


def _print_progress(stderr: IO[bytes], quiet: bool) -> None:
    """Print the lines of a command up to its error, which becomes the message of the exception."""
    with stderr:
        for line in stderr:
            quiet = quiet or line.startswith(b"ERROR: ")
            if not quiet:
                print(line.decode(errors="replace"), end="", flush=True)


def _words(overrides: Sequence[Any]) -> tuple[str, ...]:
    """Return the overrides one by one: those of a list too, and of a text with several, ``"model=resnet18 seed=1"``.

    Raises UsageError: a value that is no text.
    """
    words = list[str]()
    for item in overrides:
        if isinstance(item, (list, tuple)):
            words += _words(item)
        elif not isinstance(item, str):
            raise UsageError(
                f"{item!r} is no override",
                hint='paceline.train("experiment=quickstart", lr=0.1), or **fields of a dict',
            )
        else:
            parts = item.split()
            # a quoted text or a list may hold blanks and signs: program.args.text='a=b c=d'
            is_several = len(parts) > 1 and all(map(is_override, parts)) and not _QUOTED_OR_LISTED.search(item)
            words += parts if is_several else [item]
    return tuple(words)


def _script_line(typed: tuple[str, ...], fields: dict[str, Any]) -> list[str]:
    """Return the words of a line that starts a script, with ``fields`` as its options; [] if ``typed`` is no such line.

    A list becomes ``--sweep``, True a flag without a value; None and False add nothing.
    """
    words = shlex.split(typed[0]) if len(typed) == 1 else [*typed]
    if words and words[0].endswith(".py") and "=" not in words[0]:
        raise UsageError(f"{words[0]} is a script", hint=f'paceline.train("run {shlex.join(words)}")')
    if not words or words[0] not in _SCRIPT_VERBS:
        return []
    sweeps, options = list[str](), list[str]()
    for name, value in fields.items():
        if isinstance(value, (list, tuple, range)):
            sweeps += ["--sweep", f"{name}={','.join(map(_quote, value))}"]
        elif value is not None and value is not False:
            options += [f"--{name}", *([] if value is True else [str(value)])]
    return [words[0], *sweeps, *words[1:], *options]


def _overrides(fields: Mapping[str, Any], typed: tuple[str, ...], *, sweeps: bool = False) -> Iterator[str]:
    """Yield an override for each of ``fields``; with ``sweeps`` a list gives the values of trials.

    ``typed``: the other overrides, which decide which fields the configuration has.
    """
    all_fields: list[str] = []
    for name, value in fields.items():
        field = name.replace("__", ".")
        if "." not in field and field not in _GROUPS:
            words = [word for word in typed if "," not in word and "(" not in word]  # doit config takes no sweep
            all_fields = all_fields or [str(item["field"]) for item in run_verb("config", words, quiet=True)]
            field = _full_name(field, all_fields)
        if sweeps and isinstance(value, (list, tuple, range)):
            yield f"{field}={','.join(_quote(item) for item in value)}"
        else:
            yield f"{field}={_quote(value)}"


def _full_name(name: str, fields: list[str]) -> str:
    """Return the field whose last part is ``name``. Raises UsageError: there is none, or there are several."""
    matches = [field for field in fields if field == name or field.rpartition(".")[2] == name]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise UsageError(f"{name} is no field of the configuration", hint="doit config lists all fields")
    spelt = " or ".join(f"{field.replace('.', '__')}=…" for field in matches)
    raise UsageError(f"{name} is the last part of {len(matches)} fields", hint=spelt)


def _quote(value: Any) -> str:
    return hydra_value(value) if isinstance(value, str) else hydra_text(value)


# ------------------------------------------------------------------------------------------ runs
_SHOWN_METRICS = 8


@dataclass(frozen=True)
class Run:
    """One run. Its properties read the run folder each time, so they show the present state of a run in progress.

    Attributes:
        key: the run's key, the name of its folder.
        path: its folder, ``runs/<key>``.
    """

    key: str
    path: Path

    @property
    def state(self) -> str:
        """FINISHED, RUNNING, FAILED, …, as `doit runs` shows it."""
        return self._row.state

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of a finished run by name, accuracies in 0..1; empty before its end."""
        return self._row.figures

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as config.json has it. Secrets are placeholders."""
        return self._folder.read_json(run_folder.CONFIG) or {}

    @property
    def files(self) -> dict[str, Path]:
        """The files that the run has left, by their paths in the run folder: weights, outputs, the evaluation."""
        result = self._folder.read_result()
        names = () if result is None else result.files
        return {name: self.path / name for name in names if (self.path / name).is_file()}

    def history(self) -> Any:
        """Return the metrics logged so far, a row per step: ``step``, ``epoch``, ``time`` (unix seconds), each metric.

        A pandas DataFrame, or a list of dicts where pandas isn't installed.
        """
        steps: dict[int, dict[str, Any]] = {}
        for row in curves.rows(self.path):
            row_of_step = steps.setdefault(row.step, {"step": row.step})
            row_of_step.update({"epoch": row.epoch, "time": row.time_s, **row.metrics})
        return table([steps[step] for step in sorted(steps)])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the final weights by name, on the CPU. Raises PacelineError: not finished, a script's, or altered."""
        import torch  # needed here alone: a notebook's environment may lack it

        folder = self._finished()
        if why := index.altered_target(folder, folder.read_result(), [run_folder.FINAL_WEIGHTS]):
            raise PacelineError(f"the weights of run {folder.key} aren't those of its result: {why}")
        weights = torch.load(folder.path / run_folder.FINAL_WEIGHTS, map_location="cpu", weights_only=True)
        return cast("dict[str, Tensor]", weights)

    def model(self) -> Module:
        """Return the trained network with its preprocessing: uint8 images [n, C, H, W] → float32 logits [n, classes].

        The network is built by the run's own code, exported by torch.export and checked against the run's evaluation.
        The first call takes some seconds; later ones read the exported file (runs/.exported).

        Raises PacelineError: the run isn't finished, is a script's, or can't be exported.
        """
        import torch  # as in state_dict

        return cast("Module", torch.export.load(exported_file(self._finished())).module())

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def _row(self) -> RunRow:
        return index.row(self._folder)

    def _finished(self) -> RunFolder:
        """Return the folder of a finished run of the built-in trainer. Raises PacelineError: it is another run."""
        if not self._folder.program.is_ours:
            raise PacelineError(f"run {self.key} is that of a script: its files are in .files")
        if self._row.state not in ("FINISHED", index.ACCEPTED):
            raise PacelineError(f"run {self.key} is {self._row.state}: only a finished run has final weights")
        return self._folder

    def __repr__(self) -> str:
        row = self._row
        figures = [*row.figures.items()][:_SHOWN_METRICS]
        facts = [row.what, *(f"{name} {quantity(name, value, '.4g')}" for name, value in figures)]
        return f"<Run {self.key} {row.state}: {', '.join(facts)}>"

    def __str__(self) -> str:
        return run_status.status(self._folder)

    def _repr_html_(self) -> str:
        row = self._row
        facts = {"state": row.state, "what": row.what, "hosts": ", ".join(row.hosts)}
        facts |= {} if row.train_s is None else {"trained": duration(row.train_s)}
        facts |= {name: quantity(name, value, ".4g") for name, value in row.figures.items()}
        facts |= {"SYNTHETIC DATA": "an accuracy means nothing"} if row.synthetic else {}
        cells = ((html.escape(name), html.escape(text)) for name, text in facts.items())
        lines = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in cells)
        return f"<table><caption>run {self.key}</caption>{lines}</table>"


def run(key: str = LAST, *overrides: str) -> Run:
    """Return a run by its key, the first digits of it, or "last".

    Args:
        overrides: the folder of runs, if it isn't the one in conf/: ``"paths.runs=/data/runs"``.

    Raises UsageError: there is no such run.
    """
    if key.endswith(".py"):
        raise UsageError(f"{key} is a script, and paceline.run reads a run", hint=f'paceline.train("run {key}")')
    folder = index.find(Session(Invocation(verb="runs", overrides=overrides)).config.runs_dir, key)
    return Run(key=folder.key, path=ROOT / folder.path)


def runs(*overrides: str, state: str | None = None) -> Any:
    """List the runs, the newest first.

    Args:
        overrides: only runs with these values, as `doit runs` takes them: ``"model=resnet18"``, ``"seed=1"``.
        state: only runs in this state: "FINISHED", "FAILED", …

    Returns:
        A row for each run: ``key``, ``state``, ``when``, ``what``, ``hosts``, ``train_s``, its metrics, and the fields
        in which these runs differ. A pandas DataFrame with ``key`` as its index, or a list of dicts where pandas isn't
        installed.

    Raises UsageError: an override or a state that no run can be chosen by.
    """
    selection = listing.selected(Session(Invocation(verb="runs", overrides=overrides)), state)
    differing = listing.differences(selection.comparable)
    rows = [
        {
            "key": row.key,
            "state": row.state,
            "when": datetime.fromtimestamp(row.unix_time).astimezone(),
            "what": row.what,
            "hosts": ", ".join(row.hosts),
            "train_s": row.train_s,
            **row.figures,
            **differing[row.key],
        }
        for row in reversed(selection.rows)
    ]
    return table(rows, key="key")


def table(rows: list[dict[str, Any]], *, key: str | None = None) -> Any:
    """Return a DataFrame if pandas is installed, else the rows as they are."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas as pd  # type: ignore[import-untyped]  # its import takes half a second

    frame = pd.DataFrame(rows)
    return frame.set_index(key) if key is not None and rows else frame


# ------------------------------------------------------------------------------------------ comparisons
_COLUMNS = 120


@dataclass(frozen=True)
class Comparison:
    """The differences between runs, compared with the spread over seeds. Shown as a table by a cell and ``print``."""

    _differences: Differences

    def as_dict(self) -> dict[str, Any]:
        """Return all as plain data, in the form of `doit compare --json`."""
        return tables.as_json(self._differences)

    def __str__(self) -> str:
        return tables.text(self._differences, _COLUMNS)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True)
class Plot:
    """Curves of one metric. A cell shows them; ``save`` writes a file."""

    _bands: tuple[curves.Band, ...] = field(repr=False)
    metric: str
    x: str
    log: bool

    def save(self, path: str | Path) -> Path:
        """Write an .svg, .png or .pdf, and return its path. Raises UsageError: another ending; OSError."""
        target = Path(path)
        form = target.suffix.lower().removeprefix(".")
        if form not in FORMATS:
            raise UsageError(f"{target} must end in {', '.join(f'.{name}' for name in FORMATS)}")
        write_atomic(target, self._drawn(form))
        return target

    def _repr_png_(self) -> bytes:
        return self._drawn("png")

    def _drawn(self, form: str) -> bytes:
        return drawing.curve_file(list(self._bands), metric=self.metric, axis=self.x, form=form, log=self.log)


def compare(*runs: Run | str, metric: str | None = None) -> Comparison:
    """Compare runs: what `doit compare` shows.

    Args:
        runs: runs, keys (or their first digits), or overrides that choose runs (``"experiment=quickstart"``). Runs that
            differ only in their seed form one configuration.
        metric: only this metric.

    Raises UsageError: no run is chosen, or none has the metric.
    """
    current, keys = _session_and_keys("compare", runs)
    groups = choosing.as_configurations(choosing.chosen_runs(current, keys), keys)
    return Comparison(compared(groups, [] if metric is None else [metric]))


def plot(*runs: Run | str, metric: str | None = None, x: str = "step", log: bool = False) -> Plot:
    """Plot a metric with its spread over seeds: what `doit plot` draws.

    Args:
        runs: as for ``compare``.
        metric: default: val/accuracy, or the first metric of a script.
        x: "step", "epoch" or "minutes".
        log: with a logarithmic axis of values.

    Raises UsageError: no run is chosen, none has such a curve, or there is no such axis.
    """
    if x not in curves.AXES:
        raise UsageError(f"x={x} is no axis; {suggestion(x, curves.AXES)}")
    current, keys = _session_and_keys("plot", runs)
    name, bands, _ = choosing.metric_and_bands(choosing.chosen_runs(current, keys), metric, x, keys=keys)
    return Plot(tuple(curves.positive_parts(band) if log else band for band in bands), name, x, log)


def _session_and_keys(verb: str, runs: tuple[Run | str, ...]) -> tuple[Session, list[str]]:
    """Return a session with the overrides among ``runs``, and the keys among them."""
    texts = [item.key if isinstance(item, Run) else item for item in runs]
    keys = [text for text in texts if "=" not in text]
    return Session(Invocation(verb=verb, overrides=tuple(text for text in texts if "=" in text))), keys
