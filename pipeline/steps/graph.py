"""The dependency graph of steps and the state of each step: up to date, or to be run and why. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pipeline.config.own_targets import check_step
from pipeline.core.errors import DataError, os_reason
from pipeline.core.files import expanded
from pipeline.core.places import shown
from pipeline.data.request import fingerprints
from pipeline.data.sources.source import walked
from pipeline.keys.content_key import ContentKey
from pipeline.steps import declared, store
from pipeline.steps.key import changed, step_key
from pipeline.steps.step import PREFIX, Step, StepError, named
from pipeline.steps.store import Made


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The state of a step.

    ``key`` is None while a required step is not up to date. ``made`` is None if the step must run; ``why`` gives the
    reasons, one per line. ``inputs`` are the files of each entry of ``step.inputs``.
    """

    step: Step
    key: ContentKey | None
    made: Made | None
    why: tuple[str, ...] = ()
    inputs: tuple[tuple[Path, ...], ...] = ()


class Graph:
    """The steps of one configuration, each loaded on first use.

    Args:
        composed: the resolved configuration.
        root: the project.
        hosts: returns the number of hosts, on which steps with ``on: hosts`` run.
    """

    def __init__(
        self, composed: Mapping[str, Any], *, root: Path, runs_dir: Path, hosts: Callable[[], int] = lambda: 1
    ) -> None:
        self.composed, self.root, self.runs_dir, self._hosts = composed, root, runs_dir, hosts
        self._steps: dict[str, Step] = {}
        self._standings: dict[str, Standing] = {}

    def names(self) -> list[str]:
        """Return all steps. Raises StepError."""
        return declared.names(self.root)

    def step(self, name: str) -> Step:
        """Return a step. Raises StepError, UsageError."""
        if name not in self._steps:
            self._steps[name] = declared.load(name, self.composed, self.root)
        return self._steps[name]

    def order(self, names: Iterable[str]) -> list[str]:
        """Return these steps and all that they need, in topological order. Raises StepError: a cycle."""
        needs: dict[str, tuple[str, ...]] = {}
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if name not in needs:
                needs[name] = self.step(name).upstream
                waiting += needs[name]
        try:
            return [*TopologicalSorter(needs).static_order()]
        except CycleError as error:
            circle = " → ".join(reversed(error.args[1]))
            what = f"steps need each other: {circle}"
            raise StepError(what, hint="take one of these out of the other's inputs") from error

    def standing(self, name: str) -> Standing:
        """Return the state of a step.

        Raises StepError, UsageError: the state is undecidable, or an input is missing.
        """
        known = self._standings.get(name)
        if known is None:
            self.order([name])  # refuses a cycle before the recursion
            known = self._standings[name] = self._look(self.step(name))
        return known  # not self._standings[name]: another thread may have called forget()

    def forget(self) -> None:
        """Drop the cached states, after a step was run."""
        self._standings.clear()

    def _look(self, step: Step) -> Standing:
        if step.function:
            check_step(f"step.{step.name}", step.function, step.args, self.root)
        open_ = [name for name in step.upstream if self.standing(name).made is None]
        groups = [self._files(step, item) for item in step.inputs if not self._waits(item, open_)]
        if open_:
            return Standing(step=step, key=None, made=None, why=tuple(f"after step {name}" for name in open_))
        key = self.key(step, groups)
        made, why = store.look(store.folder_of(self.runs_dir, step, key), key, self.root)
        reasons = () if made else (why,) if why else self._reasons(step, key)
        files = tuple(tuple(path for _, path in group) for group in groups)
        return Standing(step=step, key=key, made=made, why=reasons, inputs=files)

    def key(self, step: Step, groups: list[list[tuple[str, Path]]]) -> ContentKey:
        """Compute the key from the current files. Raises StepError: a file can't be read."""
        labels = {label: path for group in groups for label, path in group}
        try:
            digests = fingerprints([*dict.fromkeys(labels.values())], store.steps_dir(self.runs_dir))
        except OSError as error:
            raise StepError(f"step {step.name}: an input can't be read: {os_reason(error)}") from error
        except DataError as error:
            raise StepError(f"step {step.name}: {error.what}", hint=error.hint) from error
        hosts = self._hosts() if step.on == "hosts" else int(step.on == "first")
        return step_key(step, {label: digests[path][1] for label, path in labels.items()}, self.root, hosts)

    def fresh_key(self, step: Step) -> ContentKey:
        """Return the key for the current files, for a step that has just been run. Raises StepError, UsageError."""
        return self.key(step, [self._files(step, item) for item in step.inputs])

    @staticmethod
    def _waits(item: str, open_: list[str]) -> bool:
        return item.startswith(PREFIX) and named(item)[0] in open_

    def _files(self, step: Step, item: str) -> list[tuple[str, Path]]:
        """Return name and path of each file of an entry of ``inputs``. Raises StepError: there is none."""
        if item.startswith(PREFIX):
            name, inside = named(item)
            made = self.standing(name).made
            if made is None:  # its outputs were altered while this step used them
                raise StepError(f"step {step.name}: step {name} isn't made any more", hint="the same command again")
            return store.inside(self.step(name), made, inside)
        try:
            self._refuse_store(step, item)
            paths = _matches(item, self.root)
        except OSError as error:  # a name too long, or an unreadable folder
            raise StepError(f"step {step.name}: inputs: {item!r} can't be read: {os_reason(error)}") from error
        if not paths:
            raise StepError(
                f"step {step.name}: inputs: {item!r} matches no file in {self.root}",
                hint=f"doit step lists the steps; a file that a step makes is written {PREFIX}NAME/{Path(item).name}",
            )
        return [(shown(path, self.root), path) for path in paths]

    def _refuse_store(self, step: Step, item: str) -> None:
        """Refuse an entry that contains the folder of steps, which changes with every step. Raises StepError."""
        kept = store.steps_dir(self.runs_dir)
        for path in _named(item, self.root):
            if kept.is_relative_to(path) or path.is_relative_to(kept):
                raise StepError(
                    f"step {step.name}: inputs: {item!r} holds {kept}, where steps are made: it would be another input "
                    "each time",
                    hint=f"name folders or files beside it; outputs of a step are {PREFIX}NAME/FILE",
                )

    def _reasons(self, step: Step, key: ContentKey) -> tuple[str, ...]:
        """Explain why the step must run: the differences from its nearest earlier version."""
        earlier = [record for _, record in earlier_of(self.runs_dir, step.name)]
        if not earlier:
            return ("never made",)
        compared = sorted((changed(record, step, key) for record in earlier), key=len)
        return tuple(compared[0]) or ("its parts are the same, but not its key",)


def earlier_of(runs_dir: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders of a step's earlier versions, with any key, and their step.json."""
    records = [(path, store.record_of(path)) for path in sorted(store.steps_dir(runs_dir).glob(f"{name}-*"))]
    return [(path, record) for path, record in records if record is not None and record.get("name") == name]


def _named(pattern: str, root: Path) -> list[Path]:
    """Return the files and folders that match a pattern."""
    path = expanded(pattern, f"inputs: {pattern}")
    if path.is_absolute():
        anchor, rest = Path(path.anchor), path.relative_to(path.anchor)
    else:
        anchor, rest = root, path
    return [anchor / rest] if (anchor / rest).exists() else sorted(anchor.glob(str(rest)))


def _matches(pattern: str, root: Path) -> list[Path]:
    """Return the matching files, and all files in matching folders."""
    files = [inner for item in _named(pattern, root) for inner in ([item] if item.is_file() else sorted(walked(item)))]
    return [item for item in files if item.is_file() and "__pycache__" not in item.parts]
