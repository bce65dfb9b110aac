"""The Hydra application ``python -m pipeline [--multirun] OVERRIDE …``, which trains the same runs as `doit train`.

It is for users of Hydra's own command line (--cfg, --info, --multirun, completion). `doit train` with one of these
options restarts itself as this application.
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
from pipeline.cli.loader import exit_with_error, runs_dir_before_composing, with_options_of  # noqa: E402
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
from pipeline.core.redact import move_to_environment  # noqa: E402

_FULL_ERROR = "HYDRA_FULL_ERROR"
composing.register()


@hydra.main(config_path=str(CONF_DIRS[0]), config_name=CONFIG_NAME, version_base=HYDRA_VERSION_BASE)
def main(config: DictConfig) -> None:
    """Fetch, train, evaluate and record one composed configuration."""
    os.environ.pop(_FULL_ERROR, None)  # set below for Hydra alone; ranks don't need it
    signals.begin()
    masking.on_lost_output(outlive_closed_stdout)
    overrides = tuple(HydraConfig.get().overrides.task)
    session = Session(Invocation(verb="train", overrides=overrides), composed=config)
    _call_or_exit(lambda: train.train_all(session))


def train_jobs(overrides: Sequence[tuple[str, ...]], typed: Sequence[str]) -> None:
    """Train jobs of --multirun (``overrides``) as one sweep of the ``typed`` words; for Hydra's launcher plug-in."""
    masking.on_lost_output(outlive_closed_stdout)
    _call_or_exit(lambda: sweep.run_jobs(overrides, typed))


def _call_or_exit(do: Callable[[], None]) -> None:
    """Call ``do``; end the command with the message of its error, where Hydra would print a traceback."""
    try:
        do()
    except (Exception, SystemExit) as error:
        exit_with_error(error)


def refuse_another_clone() -> None:
    """End the command if the folder where it was started belongs to another clone than this code."""
    project = places.enclosing(Path.cwd())
    try:
        places.refuse_outside()
        places.refuse_other_code(project or places.ROOT)
        places.refuse_hiding_modules(places.ROOT)
    except PacelineError as error:
        exit_with_error(error)


def checked_words() -> tuple[str, ...]:
    """Return the typed overrides after putting them into Hydra's form in sys.argv; end the command if one is wrong."""
    try:
        typed = composing.read_flags(sys.argv[1:])
        flags = [word for word in sys.argv[1:] if word not in typed.words]
        sys.argv[1:] = [*for_hydra(typed.words), *flags]  # Hydra's argparse accepts overrides before all flags only
        # Hydra composes again later; composing here as well gives Paceline's one-line errors instead of Hydra's
        trials = jobs(typed.words) if typed.multirun else []
        if trials and typed.composes:
            composing.compose_config(trials[0])
        elif typed.composes:
            Session(Invocation(verb="train", overrides=typed.words)).config  # noqa: B018  (composed and checked)
    except PacelineError as error:
        exit_with_error(with_options_of(error, "train"))
    return typed.words


if __name__ == "__main__":
    masking.begin()
    logging.raiseExceptions = False  # else Hydra's --info prints a traceback for each line that `| head` doesn't read
    unexpected.keep_tracebacks_in(runs_dir_before_composing())
    # Hydra writes its words to multirun.yaml: secrets among them are replaced by references to variables
    sys.argv[1:], by_variable = move_to_environment(sys.argv[1:])
    os.environ.update(by_variable)
    refuse_another_clone()
    words = checked_words()
    os.environ[_FULL_ERROR] = "1"  # Hydra then raises its errors instead of printing them
    try:
        main()
    except (BrokenPipeError, masking.OutputError) as error:  # while Hydra itself prints: --cfg all | head
        exit_with_error(error)
    except HydraException as error:  # from --config-name, --config-dir, --multirun, which checked_words doesn't compose
        exit_with_error(explain(error, [*words], lambda _: None))
    except ValueError as error:  # flags that exclude each other
        exit_with_error(UsageError(str(error)))
