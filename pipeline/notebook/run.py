"""A run as a notebook reads it, and the list of all runs. Reads run folders; starts and writes nothing."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.cli.commands import runs as listing
from pipeline.cli.invocation import Invocation
from pipeline.cli.session import ROOT, Session
from pipeline.comparing import curves
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.specs import LAST
from pipeline.core.tables import duration, quantity
from pipeline.execution.exported import exported_file
from pipeline.runs import index
from pipeline.runs import status as run_status
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import RunRow
from trainers.contract import run_folder

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_SHOWN_METRICS = 8


@dataclass(frozen=True)
class Run:
    """One run. Its properties read the run folder each time, so a run in progress shows how it stands now.

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
        """Return what the run has logged so far, a row for each step with metrics: ``step``, ``epoch``, ``time`` (unix
        seconds) and a column for each metric. A pandas DataFrame, or a list of dicts where pandas isn't installed."""
        steps: dict[int, dict[str, Any]] = {}
        for row in curves.rows(self.path):
            known = steps.setdefault(row.step, {"step": row.step})
            known.update({"epoch": row.epoch, "time": row.time_s, **row.metrics})
        return table([steps[step] for step in sorted(steps)])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the final weights by name, on the CPU.

        Raises:
            PacelineError: the run isn't finished, is a script's, or its weights aren't those of its result.
        """
        import torch  # for who wants tensors: a notebook may lack it

        folder = self._finished()
        if why := index.altered_target(folder, folder.read_result(), [run_folder.FINAL_WEIGHTS]):
            raise PacelineError(f"the weights of run {folder.key} aren't those of its result: {why}")
        weights = torch.load(folder.path / run_folder.FINAL_WEIGHTS, map_location="cpu", weights_only=True)
        return cast("dict[str, Tensor]", weights)

    def model(self) -> Module:
        """Return the trained network with its preprocessing: uint8 images [n, C, H, W] → float32 logits [n, classes].

        The network is built by the run's own code, exported by torch.export and checked against the run's evaluation.
        The first call takes some seconds; later ones read the exported file (runs/.exported).

        Raises:
            PacelineError: the run isn't finished, is a script's, or can't be exported.
        """
        import torch  # as above

        return cast("Module", torch.export.load(exported_file(self._finished())).module())

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def _row(self) -> RunRow:
        return index.row(self._folder)

    def _finished(self) -> RunFolder:
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
        overrides: where runs lie, if elsewhere than conf/ says: ``"paths.runs=/data/runs"``.

    Raises:
        UsageError: there is no such run.
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

    Raises:
        UsageError: an override or a state that no run can be chosen by.
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
    import pandas as pd  # type: ignore[import-untyped]  # not before: half a second, for who asks for a table

    frame = pd.DataFrame(rows)
    return frame.set_index(key) if key is not None and rows else frame
