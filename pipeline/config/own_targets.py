"""Check a user's own classes and functions before anything starts.

``model.target=my_package.nets:MyNet`` names one. A process of the same interpreter imports it as a rank would, and
describes what it accepts (``signatures``). Descriptions are stored until a file of their import closure changes.
If nothing can be said here, the hosts check it and report file and line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import signatures
from pipeline.core.cache import Cache
from pipeline.core.errors import PacelineError, UsageError, nearest, suggestion
from pipeline.core.files import canonical_json, sha256_file, sha256_text
from pipeline.core.options import source_of_installed
from pipeline.core.places import HOME, IS_INSTALLED
from pipeline.core.processes.process import python_answer
from pipeline.keys import rank_environment
from pipeline.keys.import_closure import import_closure, source_of
from trainers.core.config import OWN, TrainConfig

_OFFERED = {  # arguments that Paceline gives by itself, to those that take them
    "dataset": ("source",),
    "model": ("num_classes", "channels", "image_size"),
    "optimizer": ("lr", "weight_decay"),
    "trainer.loss": ("num_classes",),
    "dataset.augmentation": ("seeds",),
}
_ARGUMENTS = {"trainer.loss": "trainer.loss_args", "dataset.augmentation": "dataset.augmentation_args"}  # else X.args
_OF_A_CALL = {  # what functions are called with
    "trainer.loss": ("logits", "labels"),
    "trainer.metrics": ("logits", "labels"),
    "dataset.augmentation": ("image",),
}
_BASES = {
    "model": ("torch.nn.modules.module.Module", "torch.nn.Module"),
    "optimizer": ("torch.optim.optimizer.Optimizer", "torch.optim.Optimizer"),
}
"""Where the base class of a group is defined, and its public name."""
_IMPORT_S = 60.0  # of a user's modules; one that takes longer is left to the hosts
_Description = dict[str, Any]
"""What a class or function accepts, or why it can't be used; its fields: ``signatures.answer``."""


def check_targets(train: TrainConfig, root: Path, python_path: Sequence[str] = ()) -> None:
    """Refuse missing targets, and arguments that they don't take.

    ``python_path`` are the folders of ``cluster.env.PYTHONPATH``. Raises UsageError with field, file and line.
    """
    data = {"dataset.target": getattr(train.dataset, "target", "")} if train.dataset.name == OWN else {}
    targets = {**data, **train.targets}
    for field, description in _descriptions(targets, root, python_path).items():
        group = field if field in _ARGUMENTS else field.rpartition(".")[0]
        _check_kind(description, group, f"{field}={targets[field]}", root)
        section, _, name = _ARGUMENTS.get(group, f"{group}.args").partition(".")
        given = {} if group == "trainer.metrics" else getattr(getattr(train, section), name)
        _check_arguments(description, group, given, root)


def check_step(step: str, target: str, given: Mapping[str, Any], root: Path) -> None:
    """Refuse the function of a step (``step.clean``) that is missing or can't be called as steps are.

    ``given`` are its arguments besides ``inputs`` and ``out``. Raises UsageError with field, file and line.
    """
    for description in _descriptions({f"{step}.function": target}, root, ()).values():
        takes_any = any(kind == "VAR_KEYWORD" for _, kind, _ in description["parameters"])
        for word in ("inputs", "out"):
            if word not in _names(description) and not takes_any:
                what = f"{step}: {_where(description, root)} has no argument {word}, which every step gets"
                raise UsageError(what, hint=f"def {description['name']}(inputs, out)")
        _check_arguments(description, step, {**given, "inputs": (), "out": ""}, root)


def _descriptions(targets: Mapping[str, str], root: Path, python_path: Sequence[str]) -> dict[str, _Description]:
    """Return field → description of its class or function, without those that only a host can describe.

    Raises UsageError: one is missing or not callable, or its module can't be imported.
    """
    for field, target in targets.items():
        _refuse_missing(f"{field}={target}", target.partition(":")[0], root, python_path)
    described = _imported(sorted({*targets.values()}), root, python_path) if targets else {}
    for field, target in targets.items():
        _refuse_undescribed(f"{field}={target}", target.partition(":")[2], described.get(target, {}), root)
    return {field: described[target] for field, target in targets.items() if described.get(target)}


def _imported(targets: Sequence[str], root: Path, python_path: Sequence[str]) -> dict[str, _Description]:
    """Return descriptions from a process that imports the targets, or stored ones if no imported file changed."""
    closure = import_closure(root, {target.partition(":")[0] for target in targets}, python_path, may_lack=True)
    made_from = {
        "targets": targets,
        "files": {name: sha256_file(path) for name, path in closure.sources.items()},
        "versions": {**closure.versions, "python": sys.version},
        "program": sha256_file(Path(signatures.__file__)),
        "folders": [str(root), *python_path],
    }
    kept, name = Cache(root, "signatures", most=64), sha256_text(canonical_json(made_from))
    known: dict[str, _Description] | None = kept.get(name)
    if known is not None:
        return known
    path = os.pathsep.join([*python_path, *([] if IS_INSTALLED else [str(HOME)])])
    env = {**rank_environment.passed(os.environ), **rank_environment.ALWAYS, "PYTHONPATH": path}
    program = Path(signatures.__file__).read_text(encoding="utf-8")
    folders = [os.path.realpath(folder) for folder in (str(root), *python_path)]
    try:
        answer: dict[str, _Description] = python_answer(
            program, {"targets": targets, "folders": folders}, timeout_s=_IMPORT_S, cwd=root, env=env
        )
    except PacelineError:  # the process was ended by what it imported, or takes too long
        answer = {}
    if not any("failed" in description for description in answer.values()):  # it may be due to more than these files
        kept.keep({name: answer})
    return answer


def _refuse_missing(setting: str, module: str, root: Path, python_path: Sequence[str]) -> None:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(
            f"{setting}: {module} is a module of Python's own, and none of its classes or functions is made for this",
            hint=f"{setting.partition('=')[0]}=my_package.my_module:NAME, a class or function of yours or of a package",
        )
    if source_of(root, module, python_path) is not None or source_of_installed(module) is not None:
        return
    path = root / f"{module.replace('.', '/')}.py"
    folder = path.parent if path.parent.is_dir() else root
    package = module.rpartition(".")[0] if folder != root else ""
    known = (one.stem for one in folder.iterdir() if one.suffix == ".py" or (one.is_dir() and any(one.glob("*.py"))))
    close = nearest(path.stem if package else module.partition(".")[0], sorted(known))
    near = f"; did you mean {'.'.join(filter(None, (package, close)))}?" if close else ""
    raise UsageError(
        f"{setting}: there is no module {module} under {root}, nor is it installed here{near}", hint=f"write {path}"
    )


def _refuse_undescribed(setting: str, name: str, description: _Description, root: Path) -> None:
    if "failed" in description:
        raise UsageError(f"{setting}: {_line(description, root)}: {description['failed']}")
    file = _shown(description.get("file"), root)
    if (names := description.get("names")) is not None:
        near = f"it has: {', '.join(names) or 'none'}"
        if (close := nearest(name, sorted(names))) is not None:
            near = f"did you mean {close} ({_line(names[close], root)})?"
        raise UsageError(f"{setting}: {file} has no class or function {name}; {near}")
    if "value" in description:
        raise UsageError(f"{setting}: {name} in {file} is {description['value']}, and no class or function")


def _shown(file: str | None, root: Path) -> str:
    path, top = Path(os.path.realpath(file or "")), os.path.realpath(root)
    return str(path.relative_to(top) if path.is_relative_to(top) else path)


def _line(description: _Description, root: Path) -> str:
    return f"{_shown(description['file'], root)}:{description['line']}"


def _where(description: _Description, root: Path) -> str:
    return f"{description['name']} ({_line(description, root)})" if description["file"] else str(description["name"])


def _check_kind(description: _Description, group: str, setting: str, root: Path) -> None:
    """Refuse a class without the required base, and a function where a class is needed."""
    defined, public = _BASES.get(group, ("", ""))
    if not defined or defined in description["bases"]:
        return
    if description["is_class"] or group == "optimizer":
        what = f"is no subclass of {public}" if description["is_class"] else "is a function"
        hint = f"class {description['name']}({public}): …"
        raise UsageError(f"{setting}: {_where(description, root)} {what}", hint=hint)


def _names(description: _Description) -> list[str]:
    """Return the parameters that can be given by name, positional ones first."""
    return [name for name, kind, _ in description["parameters"] if not kind.startswith("VAR_")]


def _check_arguments(description: _Description, group: str, given: Mapping[str, Any], root: Path) -> None:
    """Refuse arguments that a class or function doesn't take, and missing ones that it needs."""
    where, field = _where(description, root), _ARGUMENTS.get(group, f"{group}.args")
    kinds = [kind for _, kind, _ in description["parameters"]]
    by_place = sum(kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD") for kind in kinds)
    call = () if description["is_class"] else _OF_A_CALL.get(group, ())
    if by_place < len(call) and "VAR_POSITIONAL" not in kinds:
        takes = f"takes {by_place or 'no'} argument{'' if by_place == 1 else 's'} by place"
        raise UsageError(f"{where} {takes}; {group} is called with {' and '.join(call)}")
    names = _names(description)[1 if group == "optimizer" else len(call) :]
    for name in given:
        if name not in names and "VAR_KEYWORD" not in kinds:
            raise UsageError(f"{field}.{name} is no argument of {where}; {suggestion(name, names)}")
    with_default = {name for name, _, has_default in description["parameters"] if has_default}
    for name in names:
        if name not in with_default and name not in given and name not in _OFFERED.get(group, ()):
            if group == "trainer.metrics":
                raise UsageError(f"{where} needs {name}; a metric gets logits and labels alone")
            raise UsageError(f"{where} needs {name}, which has no default", hint=f"{field}.{name}=VALUE")
