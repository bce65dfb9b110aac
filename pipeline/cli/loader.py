"""doit's loader plug-in, the first code of each `doit` command: it checks the command line, then loads dodo.py's tasks.

Here is also the one way in which commands end with an error: one message and an exit code (``exit_with_error``).
"""

from __future__ import annotations

from pipeline.core.processes import signals

signals.leave_on_ctrl_c()  # before the other imports: a Ctrl-C during them also ends in one line

import atexit  # noqa: E402
import gc  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from pipeline.core.processes import unexpected  # noqa: E402

unexpected.install()

from doit import doit_cmd  # noqa: E402
from doit.cmd_base import DodoTaskLoader, check_tasks_exist  # noqa: E402
from doit.cmd_run import Run  # noqa: E402
from doit.exceptions import InvalidCommand  # noqa: E402
from doit.task import Task  # noqa: E402

from pipeline.cli import invocation  # noqa: E402
from pipeline.cli.invocation import without_verbosity  # noqa: E402
from pipeline.cli.output import answer_with_error, as_typed, begin_answer, coloured, note, outlive_closed_stdout  # noqa: E402
from pipeline.cli.verbs import VERBS  # noqa: E402
from pipeline.config import conf_files  # noqa: E402
from pipeline.core import masking, places  # noqa: E402
from pipeline.core.errors import PacelineError, UsageError, suggestion, text_of  # noqa: E402
from pipeline.core.processes.threads import waiting  # noqa: E402

_GARBAGE_THRESHOLD = 200_000
"""New objects after which Python collects garbage. With its default of 700, the command of a finished run collects
twenty times; the first start of a script spent 35 ms on collections with 20,000, and 13 ms with this value."""


class Loader(DodoTaskLoader):  # type: ignore[misc]  # doit has no type hints
    """Reads the command line before doit does, and reports mistakes in it as one line each."""

    # Whether doit has created this loader: it does if the folder where doit starts has a pyproject.toml that names the
    # loader, so not in a subfolder of the project. ``project.py`` looks here: if False, it restarts the command in the
    # project's folder, or refuses it.
    in_charge = False

    def __init__(self) -> None:
        """Check and parse the command line; print help if it asks for that. doit does this before anything else."""
        super().__init__()
        Loader.in_charge = True
        masking.begin()
        begin_answer()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        atexit.register(gc.freeze)  # else Python's exit collects garbage several times over all objects
        unexpected.keep_tracebacks_in(runs_dir_before_composing())
        doit_cmd.traceback = _OneLine
        try:
            places.refuse_outside()
            places.refuse_hiding_modules(places.ROOT)
            if sys.argv[1:2] == ["dumpdb"]:
                raise UsageError("doit keeps no database here: run folders say what is finished", hint="doit runs")
            _start_with_overrides()
            self._invocation = invocation.parse(sys.argv[1:])
            if not invocation.HELP_WORDS.isdisjoint(sys.argv):
                from pipeline.cli import help as pages  # a call without such a word needs none of its imports

                if (text := pages.requested(sys.argv[1:])) is not None:
                    print(as_typed(text), flush=True)
                    raise SystemExit(0)
            if any(word.startswith("-") for word in sys.argv[1:]):
                from pipeline.cli import wrong_words  # imports all settings classes; needed if a word is still a flag

                wrong_words.check(sys.argv[1:], self._invocation, self.cmd_options)
        except (PacelineError, OSError) as error:
            exit_with_error(error)

    def setup(self, opt_values: Any) -> None:
        """Load dodo.py; end the command if it belongs to another clone than this package."""
        dodo = _dodo_file(opt_values)
        if dodo.is_file():
            try:
                places.refuse_other_code(dodo.resolve().parent)
            except PacelineError as error:
                exit_with_error(error)
        super().setup(opt_values)

    def load_tasks(self, cmd: Any, pos_args: list[str]) -> Any:
        """Load dodo.py's tasks, refuse words that name none, and compose the configuration for the verb."""
        # pos_args is doit's list of task names; overrides (~key) and a verb's arguments (files) are taken out of it
        verb, arguments = self._invocation.verb, self._invocation.arguments
        _, words = without_verbosity(pos_args)
        pos_args[:] = [verb] if verb and arguments else [word for word in words if not invocation.is_override(word)]
        tasks = super().load_tasks(cmd, pos_args)
        if cmd.name in ("info", "strace"):  # doit's other commands refuse unknown tasks themselves
            check_tasks_exist({task.name: task for task in tasks}, pos_args)
        if isinstance(cmd, Run):
            try:
                # a task of the user's own dodo.py may declare parameters: then the words behind it are its arguments
                takes_words = (task.pos_arg or task.params for task in tasks if task.name in pos_args[:1])
                if verb is not None or not any(takes_words):
                    refuse_unknown(tasks, pos_args, verb, sys.argv[1:])
                if verb is None and self._invocation.overrides and not pos_args:
                    raise invalid(f"no command is named; doit train {self._invocation.overrides[0]}, for example")
            except InvalidCommand as error:
                answer_with_error(UsageError(str(error)), str(error))
                raise
            self._begin()
        return tasks

    def _begin(self) -> None:
        """Compose, so that a wrong override ends the command before any task; from now on handle signals, --budget."""
        verb = self._invocation.verb
        if verb is not None and VERBS[verb].outlives_closed_stdout:
            masking.on_lost_output(outlive_closed_stdout)
        try:
            if verb is not None and VERBS[verb].overrides:
                from pipeline.cli.session import session  # imports the configuration, which `doit list` doesn't need

                session().refuse_wrong_words()
            signals.begin()
            budget_s = self._invocation.budget_s
            if budget_s is not None and not self._invocation.is_on("detach"):  # the detached command counts it itself
                signals.limit_duration(budget_s, self._invocation.options["budget"])
        except PacelineError as error:
            exit_with_error(with_options_of(error, verb or ""))


def runs_dir_before_composing() -> Path:
    """Return the folder of runs that the words or conf/ set, found without Hydra, which some commands never load."""
    with suppress(OSError, RuntimeError):  # files of defaults that can't be read are reported when Hydra composes
        if (runs_dir := conf_files.runs_dir(places.ROOT, sys.argv[1:])) is not None:
            return runs_dir
    return places.ROOT / "runs"


def _dodo_file(options: Mapping[str, Any]) -> Path:
    """Return the task file that doit will load: dodo.py, unless its options -f or -k or DOIT_FILE say otherwise."""
    here = Path.cwd()
    folders = (here, *here.parents) if options["seek_file"] else (here,)
    named = [folder / str(options["dodoFile"]) for folder in folders]
    return next((path for path in named if path.exists()), named[0])


def _start_with_overrides() -> None:
    """Translate flags, a run's key and a torchrun command line into overrides; if there are any, restart doit."""
    words, notes = invocation.flags_as_words(sys.argv[1:]), list[str]()
    if "torchrun" in words or "run" in words:
        from pipeline.config.overrides import torchrun_line  # imports the settings of scripts

        with waiting(note, "reading torchrun's options, for which torch is imported"):
            words, notes = torchrun_line.translated(words, invocation.typed_in(), places.ROOT, VERBS)
    if words != sys.argv[1:]:
        for line in notes:
            note(line)
        # doit copied sys.argv before it created this loader, so a change of sys.argv alone would come too late
        sys.argv[1:] = words
        raise Exit(doit_cmd.DoitMain().run(words))


def refuse_unknown(tasks: list[Task], words: list[str], verb: str | None, argv: Sequence[str] = ()) -> None:
    """Raise InvalidCommand for words that name no task or target. ``argv``: all words after ``doit``."""
    names = {task.name for task in tasks}
    for word in words:
        # a word with a colon may be a subtask of the user's dodo.py, but verbs have no subtasks
        is_subtask = ":" in word and (verb is None or word.partition(":")[0] in names - VERBS.keys())
        if word in names or "*" in word or is_subtask or _is_target(tasks, word):
            continue
        from pipeline.cli import wrong_words  # needed for this error alone

        if advice := wrong_words.advice(word, argv or words, verb):
            raise invalid(
                f"{word!r}: {advice}" if advice == wrong_words.NO_RUN else f"{word!r} is no command; {advice}"
            )
        raise invalid(f"there is no command {word!r}; {suggestion(word, ['run', *(n for n in names if n[0] != '_')])}")


def invalid(text: str) -> InvalidCommand:
    """Return an error that doit prints unchanged."""
    return InvalidCommand(as_typed(text))


def _is_target(tasks: list[Task], word: str) -> bool:
    """Whether a task makes this file, or a delayed task (doit's ``create_after``) says by a pattern that it may."""
    patterns = (task.loader.target_regex for task in tasks if task.loader is not None)
    return any(word in task.targets for task in tasks) or any(re.match(regex, word) for regex in patterns if regex)


def with_options_of(error: PacelineError, verb: str) -> PacelineError:
    """Return the error; one about an unknown key of the configuration then also suggests options of verbs."""
    from pipeline.config.unknown_key import UnknownKeyError  # whoever has composed has imported it already

    if not isinstance(error, UnknownKeyError):
        return error
    if error.key == "run" and VERBS[verb].takes_all_overrides:
        return UsageError(
            f"doit {verb} takes the words of the run, as doit train got them, and not its key",
            hint=f"doit {verb} experiment=…",
        )
    verbs_by_option: dict[str, list[str]] = {}
    for name, other in VERBS.items():
        for option in other.options:
            verbs_by_option.setdefault(option, []).append(name)
    return error.of_verb(verb, tuple(VERBS[verb].options), verbs_by_option)


class _OneLine:
    """Replaces the module ``traceback`` in doit's main function, which prints it for each error outside of tasks."""

    @staticmethod
    def format_exc() -> NoReturn:
        error = sys.exc_info()[1]
        assert error is not None  # doit calls this while it handles an error
        if _is_of_doit(error):
            text = text_of(error)
            exit_with_error(UsageError(f"doit can't do that: {type(error).__name__}{': ' if text else ''}{text}"))
        exit_with_error(error)


def _is_of_doit(error: BaseException) -> bool:
    """Whether no code of Paceline or of dodo.py took part in the error: usually a wrong value of doit's own options."""
    own_paths = [places.ROOT.resolve() / "dodo.py"]
    own_paths += [places.HOME / name for name in ("hydra_plugins", *places.PACKAGES)]
    files = (Path(frame.filename).resolve() for frame in traceback.extract_tb(error.__traceback__))
    return not any(file.is_relative_to(path) for file in files for path in own_paths)


class Exit(SystemExit):
    """An exit with a code that survives `doit -n`, whose processes pass on exceptions as text."""

    # there SystemExit(3) becomes SystemExit("3"), which prints 3 and exits with 1
    def __init__(self, code: int | str) -> None:
        super().__init__(int(code))


def exit_if_interrupted() -> None:
    """Exit with the code of the signal (130 for Ctrl-C) if one has come; its verb has printed the last line already."""
    if signals.ctrl_c_came():
        raise Exit(128 + signals.first_signal())


def exit_with_error(error: BaseException) -> NoReturn:
    """End the command: print the error as one message, and exit with the code of its kind."""
    is_unread = unexpected.nobody_reads(error)
    if is_unread or isinstance(error, masking.OutputError):
        masking.silence(1)  # else Python fails again when it flushes stdout at its exit
    if is_unread:  # `| head` has read enough, which is no error to report
        raise Exit(unexpected.EXIT_UNREAD)
    message = as_typed(unexpected.error_message(error))
    answer_with_error(error, message)
    sys.stderr.write(coloured(f"ERROR: {message}\n", sys.stderr))
    raise Exit(unexpected.exit_code(error))
