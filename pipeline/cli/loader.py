"""doit's loader plug-in: it checks the command line before any task starts, loads dodo.py, and ends commands."""

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
from pipeline.cli.output import as_typed, begin_answer, coloured, note, outlive_closed_stdout, refuse  # noqa: E402
from pipeline.cli.verbs import VERBS  # noqa: E402
from pipeline.config import conf_files  # noqa: E402
from pipeline.core import masking, places  # noqa: E402
from pipeline.core.errors import PacelineError, UsageError, suggestion, text_of  # noqa: E402
from pipeline.core.processes.threads import waiting  # noqa: E402

_GARBAGE_THRESHOLD = 200_000
"""Objects made before Python looks for garbage. Its default of 700 is due twenty times in a no-op; with 20,000 a first
start of a script took 35 ms for it, with this 13."""


class Loader(DodoTaskLoader):  # type: ignore[misc]  # doit has no type hints
    """Reads the command line once and reports a mistake in one line.

    doit creates the loader before it looks at the words itself, where an empty one would raise an IndexError.
    """

    in_charge = False  # whether pyproject.toml of the folder where doit was started names this loader

    def __init__(self) -> None:
        super().__init__()
        Loader.in_charge = True
        masking.begin()
        begin_answer()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        atexit.register(gc.freeze)  # or the interpreter's end goes through all objects of the process, several times
        unexpected.keep_in(runs_dir_before_composing())
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
                from pipeline.cli import wrong_words  # the groups and settings: for options that stay options

                wrong_words.check(sys.argv[1:], self._invocation, self.cmd_options)
        except (PacelineError, OSError) as error:
            leave(error)

    def setup(self, opt_values: Any) -> None:
        """Load dodo.py, if it belongs to the same clone as this package."""
        dodo = _dodo_file(opt_values)
        if dodo.is_file():
            try:
                places.refuse_other_code(dodo.resolve().parent)
            except PacelineError as error:
                leave(error)
        super().setup(opt_values)

    def load_tasks(self, cmd: Any, pos_args: list[str]) -> Any:
        """Compose for a verb that takes overrides, then load dodo.py's tasks.

        ``pos_args`` is doit's own list of task names: bare ``~key`` words and paths are removed from it.
        """
        verb, arguments = self._invocation.verb, self._invocation.arguments
        _, words = without_verbosity(pos_args)
        pos_args[:] = [verb] if verb and arguments else [word for word in words if not invocation.is_override(word)]
        tasks = super().load_tasks(cmd, pos_args)
        if cmd.name in ("info", "strace"):  # the two of doit's commands that don't look
            check_tasks_exist({task.name: task for task in tasks}, pos_args)
        if isinstance(cmd, Run):
            try:
                takes_words = (task.pos_arg or task.params for task in tasks if task.name in pos_args[:1])
                if verb is not None or not any(takes_words):
                    refuse_unknown(tasks, pos_args, verb, sys.argv[1:])
                if verb is None and self._invocation.overrides and not pos_args:
                    raise invalid(f"no command is named; doit train {self._invocation.overrides[0]}, for example")
            except InvalidCommand as error:
                refuse(UsageError(str(error)), str(error))
                raise
            self._begin()
        return tasks

    def _begin(self) -> None:
        """Refuse a bad override now, with exit code 3, and not in the middle of a task; take signals and --budget."""
        verb = self._invocation.verb
        if verb is not None and VERBS[verb].outlives_closed_stdout:
            masking.on_lost_output(outlive_closed_stdout)
        try:
            if verb is not None and VERBS[verb].overrides:
                from pipeline.cli.session import session  # what composes: not for `doit list` and help

                session().refuse_wrong_words()
            signals.begin()
            budget_s = self._invocation.budget_s
            if budget_s is not None and not self._invocation.is_on("detach"):  # else the detached command's
                signals.limit_duration(budget_s, self._invocation.options["budget"])
        except PacelineError as error:
            leave(with_options_of(error, verb or ""))


def runs_dir_before_composing() -> Path:
    """Return the folder of runs as far as the words and conf/ show it without Hydra."""
    with suppress(OSError, RuntimeError):  # defaults that can't be read are refused later
        if (runs_dir := conf_files.runs_dir(places.ROOT, sys.argv[1:])) is not None:
            return runs_dir
    return places.ROOT / "runs"


def _dodo_file(options: Mapping[str, Any]) -> Path:
    """Return the file that doit is about to load by its options ``-f``, ``-k`` and DOIT_FILE."""
    here = Path.cwd()
    folders = (here, *here.parents) if options["seek_file"] else (here,)
    named = [folder / str(options["dodoFile"]) for folder in folders]
    return next((path for path in named if path.exists()), named[0])


def _start_with_overrides() -> None:
    """Restart doit, which has copied the words, if flags, a key or a torchrun line among them are translated."""
    words, notes = invocation.flags_as_words(sys.argv[1:]), list[str]()
    if "torchrun" in words or "run" in words:
        from pipeline.config.overrides import torchrun_line  # the settings of scripts: for such a line alone

        with waiting(note, "reading torchrun's options, for which torch is imported"):
            words, notes = torchrun_line.translated(words, invocation.typed_in(), places.ROOT, VERBS)
    if words != sys.argv[1:]:
        for line in notes:
            note(line)
        sys.argv[1:] = words
        raise Exit(doit_cmd.DoitMain().run(words))


def refuse_unknown(tasks: list[Task], words: list[str], verb: str | None, argv: Sequence[str] = ()) -> None:
    """Refuse words that name no task or target, with a suggestion. Raises InvalidCommand.

    ``argv``: all words after ``doit``, if there are more than ``words``.
    """
    names = {task.name for task in tasks}
    for word in words:
        is_subtask = ":" in word and (verb is None or word.partition(":")[0] in names - VERBS.keys())
        if word in names or "*" in word or is_subtask or _is_target(tasks, word):
            continue
        from pipeline.cli import wrong_words  # the groups of conf/: for this error alone

        if advice := wrong_words.advice(word, argv or words, verb):
            raise invalid(
                f"{word!r}: {advice}" if advice == wrong_words.NO_RUN else f"{word!r} is no command; {advice}"
            )
        raise invalid(f"there is no command {word!r}; {suggestion(word, ['run', *(n for n in names if n[0] != '_')])}")


def invalid(text: str) -> InvalidCommand:
    """Return an error that doit prints unchanged."""
    return InvalidCommand(as_typed(text))


def _is_target(tasks: list[Task], word: str) -> bool:
    """Whether a task makes this file, or declares by a pattern that a later task does."""
    late = (task.loader.target_regex for task in tasks if task.loader is not None)
    return any(word in task.targets for task in tasks) or any(re.match(pattern, word) for pattern in late if pattern)


def with_options_of(error: PacelineError, verb: str) -> PacelineError:
    """Let the error about an unknown key also suggest options of this verb and of others."""
    from pipeline.config.unknown_key import UnknownKeyError  # the settings classes: whoever composes has them

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
    """Replaces ``traceback`` in doit's main function, which prints a page for any error outside of a task."""

    @staticmethod
    def format_exc() -> NoReturn:
        error = sys.exc_info()[1]
        assert error is not None  # doit asks while it handles one
        if _is_of_doit(error):
            text = text_of(error)
            leave(UsageError(f"doit can't do that: {type(error).__name__}{': ' if text else ''}{text}"))
        leave(error)


def _is_of_doit(error: BaseException) -> bool:
    """Whether doit alone raised the error, usually for a wrong value of its own options."""
    ours = [places.ROOT.resolve() / "dodo.py"]
    ours += [places.HOME / name for name in ("hydra_plugins", *places.PACKAGES)]
    files = (Path(frame.filename).resolve() for frame in traceback.extract_tb(error.__traceback__))
    return not any(file.is_relative_to(place) for file in files for place in ours)


class Exit(SystemExit):
    """An exit that `doit -n` can recreate from its text: of SystemExit("3") it would print 3, and exit with 1."""

    def __init__(self, code: int | str) -> None:
        super().__init__(int(code))


def leave_if_interrupted() -> None:
    """Exit with the code of Ctrl-C if one has come; a verb that it ended has printed its last line."""
    if signals.ctrl_c_came():
        raise Exit(128 + signals.first_signal())


def leave(error: BaseException) -> NoReturn:
    """End with one message and its exit code."""
    is_unread = unexpected.nobody_reads(error)
    if is_unread or isinstance(error, masking.OutputError):
        masking.silence(1)
    if is_unread:
        raise Exit(unexpected.EXIT_UNREAD)
    message = as_typed(unexpected.error_message(error))
    refuse(error, message)
    sys.stderr.write(coloured(f"ERROR: {message}\n", sys.stderr))
    raise Exit(unexpected.exit_code(error))
