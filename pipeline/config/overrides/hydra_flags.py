"""Parse the flags of Hydra's own command line, and refuse in one line what Hydra would answer with a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from hydra._internal.utils import get_args_parser

from pipeline.config.compose import CONF_DIRS
from pipeline.core.errors import UsageError
from pipeline.core.places import HOME

_EXCLUSIVE = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")


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
        raise UsageError("--experimental-rerun: a run is not made again from a pickle", hint="doit reproduce KEY")
    if args.shell_completion and not any(word.startswith(("install=", "uninstall=", "query=")) for word in argv):
        raise UsageError(
            "--shell-completion needs install=SHELL or uninstall=SHELL",
            hint='eval "$(python -m pipeline --shell-completion install=bash)"',
        )
    own_path = args.config_path is not None and "://" not in args.config_path  # otherwise a package
    folders = [HOME / "pipeline" / args.config_path] if own_path else [*CONF_DIRS]  # Hydra's place for a relative one
    folders += [Path(args.config_dir)] if args.config_dir is not None else []
    if absent := next((folder for folder in folders if not folder.is_dir()), None):
        raise UsageError(f"there is no folder {absent}", hint="an absolute path")
    if args.config_name is not None:
        name = args.config_name.removesuffix(".yaml")
        if not any((folder / f"{name}.yaml").is_file() for folder in folders):
            is_experiment = any((folder / "experiment" / f"{name}.yaml").is_file() for folder in folders)
            raise UsageError(
                f"--config-name {name}: there is no {name}.yaml in {' or '.join(map(str, folders))}",
                hint=f"experiment={name}" if is_experiment else None,
            )
    answers = args.help or args.hydra_help or args.info or args.shell_completion
    elsewhere = args.config_path or args.config_name or args.config_dir
    return HydraFlags(words=tuple(args.overrides), multirun=bool(args.multirun), composes=not (answers or elsewhere))


def _refuse(message: str) -> NoReturn:
    """Replace argparse's own ``error``. A flag without its value takes the next word, even an override."""
    raise UsageError(message, hint="--cfg job, --info or --info defaults, behind the overrides")
