"""Checks of a user's own classes and functions (``model.target=my_package.nets:MyNet``) before anything starts.

A child process imports and describes them (``signatures.py``). What can't be imported here is left to the hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config import signatures
from pipeline.config.signatures import TargetDescription
from pipeline.core.cache import Cache
from pipeline.core.errors import PacelineError, UsageError, nearest, suggestion
from pipeline.core.files import canonical_json, sha256_file, sha256_text
from pipeline.core.options import source_of_installed
from pipeline.core.places import HOME, IS_INSTALLED
from pipeline.core.processes.process import python_answer
from pipeline.keys import rank_environment
from pipeline.keys.import_closure import import_closure, source_file
from trainers.core.config import OWN, TrainConfig

_IMPORT_S = 60.0  # for the import of a user's modules; a slower one is checked by the hosts alone


class _Use(NamedTuple):
    """How Paceline calls the class or function that a setting names."""

    arguments: str  # the setting that has the user's arguments for it
    offered: tuple[str, ...] = ()  # keyword arguments that Paceline passes if it accepts them
    positional: tuple[str, ...] = ()  # positional arguments that Paceline passes to a function
    base: str = ""  # the base class that it must have, by the module that defines that
    public_base: str = ""  # the public name of the base class


_USES = {
    "dataset": _Use("dataset.args", offered=("source",)),
    "dataset.augmentation": _Use("dataset.augmentation_args", offered=("seeds",), positional=("image",)),
    "model": _Use(
        "model.args",
        offered=("num_classes", "channels", "image_size"),
        base="torch.nn.modules.module.Module",
        public_base="torch.nn.Module",
    ),
    "optimizer": _Use(
        "optimizer.args",
        offered=("lr", "weight_decay"),
        base="torch.optim.optimizer.Optimizer",
        public_base="torch.optim.Optimizer",
    ),
    "trainer.loss": _Use("trainer.loss_args", offered=("num_classes",), positional=("logits", "labels")),
    "trainer.metrics": _Use("", positional=("logits", "labels")),
}


def check_targets(train: TrainConfig, root: Path, python_path: Sequence[str] = ()) -> None:
    """Raise UsageError, with field, file and line, for a missing target, and for arguments that it doesn't take."""
    data = {"dataset.target": getattr(train.dataset, "target", "")} if train.dataset.name == OWN else {}
    targets = {**data, **train.targets}
    for field, description in _descriptions(targets, root, python_path).items():
        setting = field if field in _USES else field.rpartition(".")[0]  # model.target, trainer.metrics.NAME
        use = _USES[setting]
        _check_base(description, use, setting, f"{field}={targets[field]}")
        section, _, name = use.arguments.partition(".")
        _check_arguments(description, use, setting, getattr(getattr(train, section), name) if section else {})


def check_step(step: str, target: str, args: Mapping[str, Any], root: Path) -> None:
    """Raise UsageError if a step's function is missing or can't be called with ``inputs``, ``out`` and ``args``."""
    for description in _descriptions({f"{step}.function": target}, root, ()).values():
        takes_any = any(parameter.kind == "VAR_KEYWORD" for parameter in description.parameters)
        for name in ("inputs", "out"):
            if name not in _names(description) and not takes_any:
                raise UsageError(
                    f"{step}: {description.where} has no argument {name}, which every step gets",
                    hint=f"def {description.name}(inputs, out)",
                )
        _check_arguments(description, _Use(f"{step}.args"), step, {**args, "inputs": (), "out": ""})


def _descriptions(targets: Mapping[str, str], root: Path, python_path: Sequence[str]) -> dict[str, TargetDescription]:
    """Return field → description of its target, as far as this computer can tell. Raises UsageError: it is unusable."""
    for field, target in targets.items():
        _refuse_missing_module(f"{field}={target}", target.partition(":")[0], root, python_path)
    by_target = _describe(sorted({*targets.values()}), root, python_path) if targets else {}
    described: dict[str, TargetDescription] = {}
    for field, target in targets.items():
        if (description := by_target.get(target)) is not None:
            _refuse_unusable(f"{field}={target}", target.partition(":")[2], description)
            described[field] = description
    return described


def _describe(targets: Sequence[str], root: Path, python_path: Sequence[str]) -> dict[str, TargetDescription | None]:
    """Return target → description (None: only a host can tell), from the cache if no imported file has changed."""
    closure = import_closure(root, {target.partition(":")[0] for target in targets}, python_path, may_lack=True)
    made_from = {
        "targets": targets,
        "files": {name: sha256_file(path) for name, path in closure.sources.items()},
        "versions": {**closure.versions, "python": sys.version},
        "program": sha256_file(Path(signatures.__file__)),
        "folders": [str(root), *python_path],
    }
    cache, entry = Cache(root, "signatures", most=64), sha256_text(canonical_json(made_from))
    answer: dict[str, list[Any] | None] | None = cache.get(entry)
    if answer is None:
        answer = _ask_child(targets, root, python_path)
        # an error may have a cause besides these files, and the user may fix that
        if not any(fields and TargetDescription(*fields).error for fields in answer.values()):
            cache.keep({entry: answer})
    return {target: TargetDescription.of_json(fields) if fields else None for target, fields in answer.items()}


def _ask_child(targets: Sequence[str], root: Path, python_path: Sequence[str]) -> dict[str, list[Any] | None]:
    """Ask a child process that runs signatures.py; return {} if an import ends the process or takes too long."""
    path = os.pathsep.join([*python_path, *([] if IS_INSTALLED else [str(HOME)])])
    env = {**rank_environment.inheritable(os.environ), **rank_environment.ALWAYS, "PYTHONPATH": path}
    program = Path(signatures.__file__).read_text(encoding="utf-8")
    request = {"targets": targets, "folders": [os.path.realpath(folder) for folder in (str(root), *python_path)]}
    try:
        answer: dict[str, list[Any] | None] = python_answer(program, request, timeout_s=_IMPORT_S, cwd=root, env=env)
    except PacelineError:
        return {}
    return answer


def _refuse_missing_module(setting: str, module: str, root: Path, python_path: Sequence[str]) -> None:
    """Raise UsageError, with a similar name, if a module is neither in the project nor in an installed package."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(
            f"{setting}: {module} is a module of Python's own, and none of its classes or functions is made for this",
            hint=f"{setting.partition('=')[0]}=my_package.my_module:NAME, a class or function of yours or of a package",
        )
    if source_file(root, module, python_path) is not None or source_of_installed(module) is not None:
        return
    path = root / f"{module.replace('.', '/')}.py"
    folder = path.parent if path.parent.is_dir() else root
    package = module.rpartition(".")[0] if folder != root else ""
    modules = (one.stem for one in folder.iterdir() if one.suffix == ".py" or (one.is_dir() and any(one.glob("*.py"))))
    close = nearest(path.stem if package else module.partition(".")[0], sorted(modules))
    near = f"; did you mean {'.'.join(filter(None, (package, close)))}?" if close else ""
    raise UsageError(
        f"{setting}: there is no module {module} under {root}, nor is it installed here{near}", hint=f"write {path}"
    )


def _refuse_unusable(setting: str, name: str, description: TargetDescription) -> None:
    """Raise UsageError if the import has failed, or has shown that there is no class or function of this name."""
    if description.error:
        raise UsageError(f"{setting}: {description.place}: {description.error}")
    file, siblings = description.place.file, description.siblings
    if siblings is not None:
        close = nearest(name, sorted(siblings))
        near = f"did you mean {close}?" if close else f"it has: {', '.join(siblings) or 'none'}"
        raise UsageError(f"{setting}: {file} has no class or function {name}; {near}")
    if description.value:
        raise UsageError(f"{setting}: {name} in {file} is {description.value}, and no class or function")


def _check_base(description: TargetDescription, use: _Use, setting: str, typed: str) -> None:
    """Raise UsageError for a class without the required base. A model may also be a function that returns one."""
    if not use.base or use.base in description.bases:
        return
    if description.is_class or setting == "optimizer":
        fault = f"is no subclass of {use.public_base}" if description.is_class else "is a function"
        raise UsageError(
            f"{typed}: {description.where} {fault}", hint=f"class {description.name}({use.public_base}): …"
        )


def _names(description: TargetDescription) -> list[str]:
    """Return the names of its parameters, without ``*args`` and ``**kwargs``."""
    return [parameter.name for parameter in description.parameters if not parameter.kind.startswith("VAR_")]


def _check_arguments(description: TargetDescription, use: _Use, setting: str, args: Mapping[str, Any]) -> None:
    """Raise UsageError if it can't be called with what Paceline passes and the user's ``args``."""
    where, kinds = description.where, [parameter.kind for parameter in description.parameters]
    positional = () if description.is_class else use.positional
    accepted = sum(kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD") for kind in kinds)
    if accepted < len(positional) and "VAR_POSITIONAL" not in kinds:
        takes = f"takes {accepted or 'no'} argument{'' if accepted == 1 else 's'} by place"
        raise UsageError(f"{where} {takes}; {setting} is called with {' and '.join(positional)}")
    # without the parameters that Paceline fills by position; an optimizer's first one gets the weights
    names = _names(description)[1 if setting == "optimizer" else len(positional) :]
    if setting == "optimizer" and "lr" not in names and "VAR_KEYWORD" not in kinds:
        raise UsageError(
            f"{where} has no argument lr, which every optimizer gets", hint="def __init__(self, params, lr, …)"
        )
    for name in args:
        if name not in names and "VAR_KEYWORD" not in kinds:
            raise UsageError(f"{use.arguments}.{name} is no argument of {where}; {suggestion(name, names)}")
    with_default = {parameter.name for parameter in description.parameters if parameter.has_default}
    for name in names:
        if name not in with_default and name not in args and name not in use.offered:
            if not use.arguments:
                raise UsageError(f"{where} needs {name}; a metric gets logits and labels alone")
            raise UsageError(f"{where} needs {name}, which has no default", hint=f"{use.arguments}.{name}=VALUE")
