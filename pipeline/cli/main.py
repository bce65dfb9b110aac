"""The command `paceline`: `doit` for any folder of a project, and `paceline init`, which creates a project."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.core import places
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.files import temporary_prefix, write_atomic
from pipeline.core.processes import git, signals

signals.leave_on_ctrl_c()  # before the slow imports: a Ctrl-C during them also ends in one line


from doit.doit_cmd import DoitMain  # noqa: E402

from pipeline.cli import help as pages  # noqa: E402
from pipeline.cli import invocation  # noqa: E402
from pipeline.cli.invocation import HELP_WORDS  # noqa: E402
from pipeline.cli.loader import exit_with_error  # noqa: E402
from pipeline.cli.output import COMMAND_VARIABLE, answer, as_typed, wants_json  # noqa: E402


def main() -> int:
    """Run a command; the exit code is doit's."""
    words = sys.argv[1:]
    os.environ[COMMAND_VARIABLE] = "paceline"
    try:
        if words[:1] == ["init"]:
            message = init(words[1:])
            if wants_json():
                answer({"lines": message.splitlines()})
            else:
                print(message, flush=True)
            return 0
        project = places.enclosing(Path.cwd())
        if project is None:
            return _without_project(words)
        try:
            places.refuse_other_code(project)
        except UsageError:  # the project belongs to another installation; this one can only print help
            if HELP_WORDS.isdisjoint(words[:1]) or pages.requested(words) is None:
                raise
            return _without_project(words)
        invocation.remember_typed_in()
        os.chdir(places.ROOT)
    except (PacelineError, OSError) as error:
        exit_with_error(error)
    code: int = DoitMain().run(words)
    return code


def _without_project(words: list[str]) -> int:
    """Print help, the only answer outside of a project. Raises UsageError: the words ask for something else."""
    text = pages.requested(words or ["help"])
    if text is None:
        raise places.no_project()
    text = as_typed(text)
    print(text if words else f"{text}\n\nThere is no project here: {places.INIT}", flush=True)
    return 0


# ------------------------------------------------------------------------------- paceline init
TEMPLATE = places.HOME / "pipeline" / "template"
"""The files of a new project called ``NAME_IN_TEMPLATE``. Each ends in .txt, because it is no code of Paceline."""

NAME_IN_TEMPLATE = "my_project"
_WITHOUT_GIT = ("git=false", "--no-git")
_RESERVED_NAMES = {"conf", "data", "dodo", "runs", "tests"}


def init(words: Sequence[str]) -> str:
    """Create the project that the words after ``init`` name, completely or not at all. Return the message for users.

    ``init .`` instead adds a project's files to the current folder. Raises UsageError: not exactly one word, a name
    that can't be a package's, or a folder that isn't empty; PacelineError: the folder can't be written.
    """
    without_git = [word for word in words if word in _WITHOUT_GIT]
    words = [word for word in words if word not in (*_WITHOUT_GIT, "--json", "json=1")]
    if len(words) != 1 or words[0].startswith("-") or not words[0].strip():
        raise UsageError(
            "paceline init takes one word, the name of the project", hint=f"paceline init {NAME_IN_TEMPLATE}"
        )
    # abspath gives "." a name, and keeps symbolic links as typed
    folder = Path(os.path.abspath(Path(words[0]).expanduser()))  # noqa: PTH100
    if folder == Path(os.path.abspath(".")) and any(folder.iterdir()):  # noqa: PTH100
        return _init_around(folder)
    refuse_name(folder.name)
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder} is there already, and is no folder", hint="another name")
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"{folder} is there already, and holds something",
                hint="another name, or cd there, then paceline init . which leaves its files as they are",
            )
        _write(folder)
    except OSError as error:
        hint = "make room, or paceline init <a folder that you can write to>/" + folder.name
        raise PacelineError(f"the project {folder} can't be made: {os_reason(error)}", hint=hint) from error
    # a git repository with one commit, because runs are repeated from their commit
    if not without_git and git.answer(folder, "rev-parse", "--is-inside-work-tree") is None:
        for step in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "paceline init")):
            git.git(folder, *step)  # the commit fails if git doesn't know the user's name, which is no error here
    there = [] if folder.samefile(Path.cwd()) else [f"cd {shlex.quote(words[0])}"]
    steps = [*there, "paceline train experiment=example", "paceline ui"]
    return "\n".join([f"made {folder}; what to try next:", *(f"  {step}" for step in steps)])


def _init_around(folder: Path) -> str:
    """Make a project of a folder with files; of these only pyproject.toml changes. Raises UsageError: it is one."""
    pyproject, dodo = folder / "pyproject.toml", folder / "dodo.py"
    existing_text = pyproject.read_text("utf-8") if pyproject.exists() else ""
    if dodo.exists() or "[tool.doit" in existing_text:
        conflict = "a dodo.py" if dodo.exists() else "[tool.doit] in pyproject.toml"
        raise UsageError(
            f"{folder} has {conflict} already", hint="paceline help; docs/projects.md has a project's files"
        )
    doit_tables = _template(pyproject.name).partition("[tool.pytest")[0].rstrip() + "\n"
    if not (folder / ".gitignore").exists():
        write_atomic(folder / ".gitignore", _template(".gitignore"))
    write_atomic(pyproject, f"{existing_text.rstrip()}\n\n{doit_tables}".lstrip())
    write_atomic(dodo, _template(dodo.name))
    scripts = sorted(path.name for path in folder.glob("*.py") if path.name not in ("dodo.py", "setup.py"))
    script = scripts[0] if len(scripts) == 1 else "SCRIPT.py"
    return f"{folder} is a project now, by its dodo.py; what to try next:\n  paceline run {script}\n  paceline ui"


def _template(name: str) -> str:
    return (TEMPLATE / f"{name}.txt").read_text("utf-8")


def refuse_name(name: str) -> None:
    """Raise UsageError for a name that the project's package can't have: no identifier, or another module's name."""
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or name.startswith("__"):
        plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
        similar = plain if plain.isidentifier() and not keyword.iskeyword(plain) else f"my_{plain or 'project'}"
        raise UsageError(f"{name!r} can't be the name of a Python package", hint=f"paceline init {similar}")
    if name in _RESERVED_NAMES:
        raise UsageError(f"{name} is a name that the project needs itself", hint=f"paceline init my_{name}")
    spec = importlib.util.find_spec(name)
    # a spec without origin is a plain folder of that name in the current folder, perhaps the project's own
    if name in sys.stdlib_module_names or (spec is not None and spec.origin):
        raise UsageError(f"there is a module {name} in this Python already", hint=f"paceline init my_{name}")


def _write(folder: Path) -> None:
    """Write the files of the template into a temporary folder beside ``folder``, then put that in its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / temporary_prefix(f".{folder.name}")
    try:
        for source in sorted(path for path in TEMPLATE.rglob("*.txt") if path.is_file()):
            name = source.relative_to(TEMPLATE).as_posix().removesuffix(".txt")
            target = temporary / name.replace(NAME_IN_TEMPLATE, folder.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text("utf-8").replace(NAME_IN_TEMPLATE, folder.name), encoding="utf-8")
        if folder.is_dir():
            _move_into(folder, temporary)
        else:
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _move_into(folder: Path, made: Path) -> None:
    """Move all of ``made`` into an existing, empty ``folder``, which stays as it may be a shell's working directory."""
    moved: list[Path] = []
    try:
        # dodo.py comes last, because with it the folder counts as a project
        for item in sorted(made.iterdir(), key=lambda item: item.name == "dodo.py"):
            moved.append(item.rename(folder / item.name))
        made.rmdir()
    except BaseException:
        for item in moved:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        raise


if __name__ == "__main__":
    sys.exit(main())
