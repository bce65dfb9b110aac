"""Parse the flags of Hydra's own command line, and refuse in one line what Hydra would answer with a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from hydra._internal.utils import get_args_parser

from pipeline.config.compose import CONF_DIRS
from pipeline.core.errors import UsageError
from pipeline.core.places import HOME

_APPLICATION = HOME / "pipeline"  # Hydra looks for a relative --config-path in the application's folder
_EXCLUSIVE = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")
_SHELLS = ("bash", "fish", "zsh")


class HydraFlags(NamedTuple):
    """A parsed command line of Hydra: the overrides, and whether they stand for the trials of a sweep.

    ``composes``: a run, or each trial, is composed from this project's own conf/.
    """

    words: tuple[str, ...]
    multirun: bool
    composes: bool


def read(argv: Sequence[str]) -> HydraFlags:
    """Parse the words after ``python -m pipeline``. Raises UsageError: an unknown flag, or flags that don't agree."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would print eight lines of usage and exit with 2
    args = parser.parse_args(list(argv))
    given = [name for name in _EXCLUSIVE if getattr(args, name.strip("-").replace("-", "_"))]
    if len(given) > 1:
        hint = "doit plan with the same words lists the trials" if "--multirun" in given else f"only {given[-1]}"
        raise UsageError(f"{' and '.join(given)} can't be taken together; choose one", hint=hint)
    if args.resolve and not (args.cfg or args.help):
        raise UsageError("--resolve says how --cfg prints", hint="--cfg job --resolve")
    if args.experimental_rerun is not None:
        raise UsageError(
            f"--experimental-rerun {args.experimental_rerun}: a run is not made again from a pickle",
            hint="doit reproduce KEY",
        )
    if args.shell_completion:
        pairs = [word.partition("=")[::2] for word in args.overrides]
        named = [shell for name, shell in pairs if name in ("install", "uninstall", "query")]
        if len(named) != 1 or named[0] not in _SHELLS:
            seen = f", not {' '.join(args.overrides)}" if args.overrides else ""
            raise UsageError(
                f"--shell-completion needs install=SHELL or uninstall=SHELL with one of {', '.join(_SHELLS)}{seen}",
                hint='eval "$(python -m pipeline --shell-completion install=bash)"',
            )
    _refuse_absent(args)
    answers = args.help or args.hydra_help or args.info or args.shell_completion
    elsewhere = args.config_path or args.config_name or args.config_dir
    return HydraFlags(words=tuple(args.overrides), multirun=bool(args.multirun), composes=not (answers or elsewhere))


def _refuse(message: str) -> NoReturn:
    """Replace argparse's own ``error``. A flag without its value takes the next word, even an override."""
    raise UsageError(message, hint="--cfg job, --info or --info defaults, behind the overrides")


def _refuse_absent(args: argparse.Namespace) -> None:
    """Refuse a missing --config-dir, --config-path or --config-name. Raises UsageError."""
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise UsageError(f"--config-dir {args.config_dir}: there is no such folder", hint="an absolute path")
    folders = [*CONF_DIRS]
    if args.config_path is not None and "://" not in args.config_path:  # otherwise a package, which only Hydra finds
        folders = [_APPLICATION / args.config_path]
        if not folders[0].is_dir():
            raise UsageError(
                f"--config-path {args.config_path}: there is no folder {folders[0]}", hint="an absolute path"
            )
    name = args.config_name
    folders += [Path(args.config_dir)] if args.config_dir is not None else []
    if name is not None and not any((place / f"{name.removesuffix('.yaml')}.yaml").is_file() for place in folders):
        is_experiment = any((place / "experiment" / f"{name}.yaml").is_file() for place in CONF_DIRS)
        raise UsageError(
            f"--config-name {name}: there is no {name.removesuffix('.yaml')}.yaml in {' or '.join(map(str, folders))}",
            hint=f"experiment={name}" if is_experiment else "the same without it, which takes conf/config.yaml",
        )
