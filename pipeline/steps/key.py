"""Of what a step is made: its key, and in what that differs from the key of an earlier one."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core import redact
from pipeline.core.files import canonical_json, sha256_file, sha256_text
from pipeline.keys.content_key import ContentKey, environment
from pipeline.keys.diff import differences
from pipeline.keys.import_closure import Closure, ScriptEntry, import_closure
from pipeline.keys.order import order_in, order_of
from pipeline.steps.code_named import code_named
from pipeline.steps.step import PREFIX, Step, StepError

VERSION = 1
_PYTHON = ("python", "python3")
_OUTSIDE = "_script/"


def is_python(word: str) -> bool:
    """Whether a command's first word asks for Python: on this computer that of the project."""
    return word in _PYTHON


def step_key(step: Step, inputs: Mapping[str, str], root: Path, hosts: int = 0) -> ContentKey:
    """The key of a step.

    Args:
        inputs: sha256 by name: a path, or ``step:clean/images.npz``.
        root: the project.
        hosts: on how many it runs; 0: on this computer.

    Raises:
        UsageError: a Python source of it can't be parsed, or imports what isn't here, or isn't told.
    """
    code, versions = code_of(step, root)
    config: dict[str, Any] = {
        "command": [*step.command] if isinstance(step.command, tuple) else step.command,
        "function": step.function,
        "args": dict(step.args),
        "inputs": [*step.inputs],
        "outputs": [*step.outputs],
        "env": {name: redact.hide(value, step.secrets) for name, value in step.env.items()},
        "on": step.on,
    }
    is_words = isinstance(step.command, tuple) and bool(step.command)
    order = order_of(step.args, "args") if is_words else order_in({"step": {"args": step.args}})
    parts: dict[str, Any] = {
        "version": VERSION,
        "config": {**config, "order": order} if order else config,
        "code": dict(sorted(code.items())),
        "data": dict(inputs),
        "environment": environment(versions) if versions is not None else {},
        "topology": {"hosts": hosts} if hosts else {},
    }
    return ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)


def code_of(step: Step, root: Path) -> tuple[dict[str, str], dict[str, str] | None]:
    """What counts of each file of its code, by path; versions of what its Python imports (None: it has no Python).

    Of a function and of Python files all that they import counts, at any depth; of other files that the command names
    the bytes, and all files of folders of the project. In a line for bash those count that it names from the project's
    folder, or from the one that its cd names.
    """
    closures, others = _code(step, root)
    digests: dict[str, str] = {}
    versions: dict[str, str] = {}
    for found in closures:
        digests |= found.digests
        versions |= found.versions
    digests |= {name: sha256_file(path) for name, path in others.items()}
    return digests, versions if closures else None


def sources_of(step: Step, root: Path) -> dict[str, Path]:
    """Where each file of its code lies, by its path in a copy of the project."""
    closures, others = _code(step, root)
    return {name: path for found in [*(one.sources for one in closures), others] for name, path in found.items()}


def _code(step: Step, root: Path) -> tuple[list[Closure], dict[str, Path]]:
    """The closures of its Python, and its other files by their path."""
    named = code_named(step, root)
    modules, texts = tuple(dict.fromkeys(named.modules)), dict.fromkeys(named.texts)
    closures = [import_closure(root, modules)] if modules or named.has_python else []
    closures += [import_closure(root, (), script=_entry(path, root)) for path in dict.fromkeys(named.scripts)]
    closures += [import_closure(root, (), script=_of_text(text, step, root)) for text in texts]
    return closures, {
        path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path): path
        for path in named.files
        if path not in named.scripts
    }


def _of_text(text: str, step: Step, root: Path) -> ScriptEntry:
    """Of a text behind -c, whose variables bash puts in. Raises StepError."""
    for source in (text, text.replace("$", "")):
        try:
            ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        return ScriptEntry(file=f"{step.name}.py", folder=str(root), prefix="", text=source)
    said = redact.hide(text, step.secrets)[:60]
    raise StepError(
        f"step {step.name}: what {said!r} imports can't be read, so that a change of it would not count",
        hint="write it to a file, and python FILE.py",
    )


def _entry(path: Path, root: Path) -> ScriptEntry:
    folder = path.parent
    inside = f"{folder.relative_to(root).as_posix()}/" if folder.is_relative_to(root) else _OUTSIDE
    return ScriptEntry(file=str(path), folder=str(folder), prefix="" if folder == root else inside)


def described(step: Step) -> dict[str, Any]:
    """``told`` and ``parameters`` as step.json has them, without secrets."""
    return redact.without_secrets({"told": step.told, "parameters": step.parameters}, step.secrets)


def changed(old: Mapping[str, Any], step: Step, key: ContentKey) -> list[str]:
    """What sets a step apart from an earlier one, by name: inputs, parameters, code, versions.

    Args:
        old: step.json of the earlier one.
    """
    now = described(step)
    parts, parameters, told = (old.get(name) or {} for name in ("parts", "parameters", "told"))
    lines = [
        f"{name}: {parameters.get(name)} → {now['parameters'].get(name)}"
        for name in sorted({*parameters, *now["parameters"]})
        if parameters.get(name) != now["parameters"].get(name)
    ]
    by_parameter = {line.partition(":")[0] for line in lines}
    for item in differences(parts, key.parts):
        if not item.field:  # nothing before, or nothing now
            continue
        field = item.field.partition(".")[0]
        references = (f"${{{name}}}" in str(now["told"].get(field)) for name in by_parameter)
        if item.part == "config" and told.get(field) == now["told"].get(field) and any(references):
            continue  # said by the name of what it refers to
        lines.append(_input(item.field, item.old, item.new) if item.part == "data" else str(item))
    return lines


def _input(name: str, old: Any, new: Any) -> str:
    change = "added" if old is None else "removed" if new is None else "changed"
    return f"{name if name.startswith(PREFIX) else f'input {name}'} {change}"
