"""The plain Hydra application: ``python -m pipeline [--multirun] overrides…`` trains what `doit train` and `sweep` do.

It is for Hydra's own command line: --cfg, --info, completion.
"""

from __future__ import annotations

from pipeline.core.processes import unexpected

unexpected.install()  # before the other imports: a Ctrl-C during them also ends in one line

import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

try:
    import hydra
except ModuleNotFoundError as absent:
    sys.stderr.write(
        f"ERROR: {sys.executable} has no module {absent.name}: it is another Python than the project's\n"
        "  try: . .venv/bin/activate in the project's folder (make install makes it), then the same command\n"
    )
    raise SystemExit(3) from None
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from pipeline.cli.commands import sweep, train  # noqa: E402
from pipeline.cli.invocation import Invocation  # noqa: E402
from pipeline.cli.loader import leave, runs_dir_before_composing, with_options_of  # noqa: E402
from pipeline.cli.output import outlive_closed_stdout  # noqa: E402
from pipeline.cli.session import Session  # noqa: E402
from pipeline.config import compose as composing  # noqa: E402
from pipeline.config.compose import CONF_DIRS, CONFIG_NAME, HYDRA_VERSION_BASE  # noqa: E402
from pipeline.config.composition_errors import explain  # noqa: E402
from pipeline.config.overrides.trials import jobs  # noqa: E402
from pipeline.config.overrides.words import for_hydra  # noqa: E402
from pipeline.core import masking, places  # noqa: E402
from pipeline.core.errors import PacelineError, UsageError  # noqa: E402
from pipeline.core.processes import signals  # noqa: E402
from pipeline.core.redact import by_environment  # noqa: E402

_FULL_ERROR = "HYDRA_FULL_ERROR"
composing.register()


@hydra.main(config_path=str(CONF_DIRS[0]), config_name=CONFIG_NAME, version_base=HYDRA_VERSION_BASE)
def main(config: DictConfig) -> None:
    """Fetch, train, evaluate and record one composed configuration."""
    os.environ.pop(_FULL_ERROR, None)  # ranks don't need it
    signals.begin()
    masking.on_lost_output(outlive_closed_stdout)
    overrides = tuple(HydraConfig.get().overrides.task)
    session = Session(Invocation(verb="train", overrides=overrides), composed=config)
    _or_leave(lambda: train.train_all(session))


def train_jobs(overrides: Sequence[tuple[str, ...]], typed: Sequence[str]) -> None:
    """Train the jobs of --multirun as one sweep (hydra_plugins/paceline_plugins.py)."""
    masking.on_lost_output(outlive_closed_stdout)
    _or_leave(lambda: sweep.run_jobs(overrides, typed))


def _or_leave(do: Callable[[], None]) -> None:
    """Do it, or end the command with the error: Hydra would print a traceback, or end well after sys.exit(0)."""
    try:
        do()
    except (Exception, SystemExit) as error:
        leave(error)


def refuse_another_clone() -> None:
    """The folder that the command is started in decides, as dodo.py does for `doit`."""
    here = places.enclosing(Path.cwd())
    try:
        places.refuse_outside()
        places.refuse_other_code(here or places.ROOT)
        places.refuse_hiding_modules(places.ROOT)
    except PacelineError as error:
        leave(error)


def checked_words() -> tuple[str, ...]:
    """The overrides, which Hydra finds in the form that it takes. What `doit` refuses is refused with the same line."""
    try:
        typed = composing.read_flags(sys.argv[1:])
        flags = [word for word in sys.argv[1:] if word not in typed.words]
        sys.argv[1:] = [*for_hydra(typed.words), *flags]  # argparse takes words on one side of the flags alone
        trials = jobs(typed.words) if typed.multirun else []
        if trials and typed.composes:
            composing.compose_config(trials[0])  # Hydra's own error knows no other words than these
        elif typed.composes:
            Session(Invocation(verb="train", overrides=typed.words)).config  # noqa: B018  (composed and checked)
    except PacelineError as error:
        leave(with_options_of(error, "train"))
    return typed.words


if __name__ == "__main__":
    masking.begin()
    logging.raiseExceptions = False  # a page of Hydra's --info for each line that `| head` doesn't take
    unexpected.keep_in(runs_dir_before_composing())
    sys.argv[1:], by_variable = by_environment(sys.argv[1:])  # Hydra writes words and values to multirun.yaml
    os.environ.update(by_variable)
    refuse_another_clone()
    words = checked_words()
    os.environ[_FULL_ERROR] = "1"  # Hydra passes on what it would print in its own form
    try:
        main()
    except (BrokenPipeError, masking.OutputError) as error:  # in Hydra's own output: --cfg all | head
        leave(error)
    except HydraException as error:  # of what only Hydra composes: --config-name, --config-dir, --multirun
        leave(explain(error, [*words], lambda _: None))
    except ValueError as error:  # of flags that can't be taken together
        leave(UsageError(str(error)))
