"""The content key of a step, which includes the code that its command runs; and what differs between two versions."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core import redact
from pipeline.core.files import canonical_json, sha256_file, sha256_text
from pipeline.keys.content_key import ContentKey, differences, environment, orders_below, orders_of_config
from pipeline.keys.import_closure import Closure, ScriptEntry, import_closure, source_file
from pipeline.steps.step import PREFIX, Step
from trainers.contract import run_folder

VERSION = 1
_PYTHON = ("python", "python3")
_PYTHON_PROGRAM = re.compile(r"(?:.*/)?python[\d.]*")
_PART = re.compile(r"[^\s'\"`();<>|&=]+")
_REDIRECTION = re.compile(r">[>|]?\s*[^\s;|&)]+")  # a redirection writes the file, so it is no input
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_python(word: str) -> bool:
    """Return True if a command's first word means Python. The step then runs with the interpreter of this process."""
    return word in _PYTHON


def step_key(step: Step, inputs: Mapping[str, str], root: Path) -> ContentKey:
    """Compute the key of a step. ``inputs``: path, or ``step:clean/images.npz`` → sha256. Raises UsageError."""
    code, versions = code_of(step, root)
    config: dict[str, Any] = {
        "command": [*step.command] if isinstance(step.command, tuple) else step.command,
        "function": step.function,
        "args": dict(step.args),
        "inputs": [*step.inputs],
        "outputs": [*step.outputs],
        "env": {name: redact.hide(value, step.secrets) for name, value in step.env.items()},
        "on": "here",  # a field of earlier versions, kept so that the keys of steps stay
    }
    # Canonical JSON sorts names, so an order that matters is added. A command of words gets its args in their order. A
    # function or bash gets them by name, so only the order of mappings inside their values counts.
    args_are_words = isinstance(step.command, tuple) and bool(step.command)
    # orders_of_config takes a whole configuration, so the args are given as the field ``args`` of a section ``step``
    order = orders_below(step.args, "args") if args_are_words else orders_of_config({"step": {"args": step.args}})
    parts: dict[str, Any] = {
        "version": VERSION,
        "config": {**config, "order": order} if order else config,
        "code": dict(sorted(code.items())),
        "data": dict(inputs),
        "environment": environment(versions) if versions is not None else {},
        "topology": {},
    }
    return ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)


def code_of(step: Step, root: Path) -> tuple[dict[str, str], dict[str, str] | None]:
    """Return digests of the code files by path, and the versions of imported distributions (None: no Python).

    Python code counts with all its imports; other project files that the command names count by their bytes.
    """
    closures, others = _code(step, root)
    digests: dict[str, str] = {}
    versions: dict[str, str] = {}
    for closure in closures:
        digests |= closure.digests
        versions |= closure.versions
    digests |= {name: sha256_file(path) for name, path in others.items()}
    return digests, versions if closures else None


def sources_of(step: Step, root: Path) -> dict[str, Path]:
    """Return the code files of a step: path in a copy of the project → path here."""
    closures, others = _code(step, root)
    return {name: path for part in [*(closure.sources for closure in closures), others] for name, path in part.items()}


def _code(step: Step, root: Path) -> tuple[list[Closure], dict[str, Path]]:
    """Return the closures of the Python code that a step runs, and the other project files that its command names."""
    words = [*_words(step)]
    runs_python = any(_PYTHON_PROGRAM.fullmatch(word) for word in words)
    inputs = [Path(os.path.normpath(root / item)) for item in step.inputs]
    paths = dict.fromkeys(Path(os.path.normpath(root / word)) for word in words if word)
    files = [path for path in paths if os.path.isfile(path) and path not in inputs]  # noqa: PTH113  (no error if too long)
    scripts = [path for path in [*files, *(inputs if runs_python else [])] if path.suffix == ".py" and path.is_file()]
    modules = [step.function.partition(":")[0]] if step.function else [*_modules(words, root)]
    # An empty closure still adds Python's version to the key.
    closures = [import_closure(root, modules)] if modules or runs_python else []
    closures += [import_closure(root, (), script=_entry(path, root)) for path in scripts]
    others = [path for path in files if path.suffix != ".py" and path.is_relative_to(root)]
    return closures, {path.relative_to(root).as_posix(): path for path in others}


def _words(step: Step) -> Iterator[str]:
    """Yield texts of the command that may name files or modules: its words, and their parts as bash would split them.

    Files reached through ``cd``, patterns or variables must be listed as inputs; the observer warns about them.
    """
    texts = (step.command, *map(str, step.args.values())) if isinstance(step.command, str) else step.words
    for text in texts:
        yield text
        for part in _PART.findall(_REDIRECTION.sub(" ", text)):
            if not part.startswith("/") or part.endswith(".py"):  # other absolute paths may be outputs
                yield part


def _modules(words: Sequence[str], root: Path) -> Iterator[str]:
    """Yield the project's modules that the words start by ``-m NAME``; a package is started by its __main__."""
    # _words yields most words twice, whole and as their only part
    for option, name in itertools.pairwise(word for word, _ in itertools.groupby(words)):
        if option == "-m" and _DOTTED.fullmatch(name):
            yield from (item for item in (name, f"{name}.__main__") if source_file(root, item) is not None)


def _entry(path: Path, root: Path) -> ScriptEntry:
    folder = path.parent
    inside = folder.relative_to(root).as_posix() if folder.is_relative_to(root) else run_folder.SCRIPT_OUTSIDE
    return ScriptEntry(file=str(path), folder=str(folder), prefix="" if folder == root else f"{inside}/")


@dataclass(frozen=True, kw_only=True)
class StepVersion:
    """What distinguishes two versions of a step, with secrets masked."""

    parts: Mapping[str, Any]  # of the key
    written: Mapping[str, Any]  # the step's fields before interpolation, with ``${optimizer.lr}``
    parameters: Mapping[str, Any]  # the values that they refer to: ``optimizer.lr`` → 0.1

    @classmethod
    def of(cls, step: Step, key: ContentKey) -> StepVersion:
        fields = {"written": step.written, "parameters": step.parameters}
        return StepVersion(parts=key.parts, **redact.without_secrets(fields, step.secrets))


def changed(old: StepVersion, new: StepVersion) -> list[str]:
    """List the differences between two versions: inputs, parameters, code, versions of distributions."""
    lines = [
        f"{name}: {old.parameters.get(name)} → {new.parameters.get(name)}"
        for name in sorted({*old.parameters, *new.parameters})
        if old.parameters.get(name) != new.parameters.get(name)
    ]
    changed_parameters = [line.partition(":")[0] for line in lines]
    for item in differences(old.parts, new.parts):
        # One version has nothing in this part of the key (no inputs, for example). Each field that the other one has
        # there is a difference of its own, with a line of its own.
        if not item.field:
            continue
        # a field that is the same before interpolation differs by a parameter, which has a line already
        field = item.field.partition(".")[0]
        references = (f"${{{name}}}" in str(new.written.get(field)) for name in changed_parameters)
        if item.part == "config" and old.written.get(field) == new.written.get(field) and any(references):
            continue
        lines.append(_input_line(item.field, item.old, item.new) if item.part == "data" else str(item))
    return lines


def _input_line(name: str, old: Any, new: Any) -> str:
    change = "added" if old is None else "removed" if new is None else "changed"
    return f"{name if name.startswith(PREFIX) else f'input {name}'} {change}"
