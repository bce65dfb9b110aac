"""What code and files the command of a step names: scripts, modules, texts behind -c, files and folders."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core import redact
from pipeline.keys.import_closure import source_of
from pipeline.steps.step import Step, StepError

_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "eval")
_TELLING = ("echo", "printf", "which", "type", "command")  # they only name python
_SIGNS = "();<>|&\n`"
_SIGN = re.compile(r"<<<?-?|[<>]\(|&>>?|>>|>[&|]?|<[&>]?|.", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_NO_FILES = ("__pycache__", "runs")
_WITH_VALUE = "WX"  # of Python's options in one letter


@dataclass(kw_only=True)
class Named:
    """``scripts`` are Python files, ``texts`` those behind -c, ``files`` count by their bytes; ``has_python``: a word
    of the command asks for Python."""

    modules: list[str] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    has_python: bool = False


def code_named(step: Step, root: Path) -> Named:
    """What the command names. Files of ``inputs`` count there.

    Raises:
        StepError: a word asks for Python, and what it would run can't be told.
    """
    look = _Look(step, root)
    if step.function:
        look.found.modules.append(step.function.partition(":")[0])
    if isinstance(step.command, str):
        look.line(step.command)
    else:
        look.command([*step.words])
    return look.found


class _Look:
    """One walk through a command. ``folder`` is where it is then; None: only the run can tell (``cd "$x"``)."""

    def __init__(self, step: Step, root: Path) -> None:
        self.step, self.root = step, root
        self.is_line = isinstance(step.command, str)
        self.folder: Path | None = root
        self.found = Named()
        self._inputs = {os.path.normpath(root / item) for item in step.inputs}

    def line(self, text: str) -> None:
        """A line for bash: its commands one after another, a folder of a subshell only in it."""
        words: list[str] = []
        outer: list[Path | None] = []
        for token, is_sign in _tokens(text):
            if not is_sign or token in ("<", ">", ">>", ">&", ">|", "&>", "&>>", "<&", "<>") or token.startswith("<<"):
                words.append(f"\0{token}" if is_sign else self._told(token))
                continue
            self.command(words)
            words = []
            if token in ("(", "<(", ">("):
                outer.append(self.folder)
            elif token == ")" and outer:
                self.folder = outer.pop()
        self.command(words)

    def _told(self, word: str) -> str:
        """With the step's own variables put in."""
        values: Mapping[str, object] = {**self.step.env, **self.step.args}
        return _VARIABLE.sub(lambda mark: str(values.get(mark[1] or mark[2], mark[0])), word)

    def command(self, told: Sequence[str]) -> None:
        """One simple command, signs of redirection marked with a NUL before them."""
        signs = [word if word.startswith("\0") else "" for word in told]
        words = [word for word, sign, before in zip(told, signs, ["", *signs], strict=False) if not sign and not before]
        read = [word for word, before in zip(told, ["", *signs], strict=False) if before == "\0<"]
        if words[:1] in (["cd"], ["pushd"]):
            self._change_folder(words[1:])
            return
        for at, word in enumerate(words):
            if _PYTHON.fullmatch(word) and not os.path.isdir(self.root / word):  # noqa: PTH112
                self.found.has_python = True
                if not self._entry(words[at + 1 :], read) and words[0] not in _TELLING:
                    self._of_inputs(words[at:])
            self._inner(word, words[:at])
        for word in [*words, *read]:
            for name in dict.fromkeys((word, word.partition("=")[2])):
                if not (self.is_line and name.startswith("/") and word not in read):  # a line may write there as well
                    self._file(name)

    def _inner(self, word: str, before: Sequence[str]) -> None:
        """A command in a word: behind bash -c, or in $(…)."""
        of_shell = any(name.rpartition("/")[2] in _SHELLS for name in before) and " " in word
        if of_shell or (self.is_line and ("$(" in word or "`" in word)):
            folder = self.folder
            self.line(word if of_shell else word[min(at for at in map(word.find, ("$(", "`")) if at >= 0) :])
            self.folder = folder

    def _change_folder(self, words: Sequence[str]) -> None:
        name = next((word for word in words if word not in ("--", "-P", "-L")), "~")
        folder = None if self.folder is None and not name.startswith("/") else (self.folder or self.root) / name
        self.folder = Path(os.path.normpath(folder)) if folder is not None and os.path.isdir(folder) else None  # noqa: PTH112

    def _entry(self, words: Sequence[str], read: Sequence[str]) -> bool:
        """Whether it was found what Python runs, by the words behind it or what it reads."""
        rest = [*words]
        while rest:
            word = rest.pop(0)
            if word in ("-V", "-VV", "--version", "-h", "--help"):
                return True
            if word.startswith("--"):
                rest = rest[1:] if word == "--check-hash-based-pycs" else rest
            elif word.startswith("-") and word != "-":
                at = next((at for at, letter in enumerate(word) if letter in f"cm{_WITH_VALUE}" and at), None)
                if at is None:
                    continue
                value = word[at + 1 :] or (rest.pop(0) if rest else "")
                if word[at] not in _WITH_VALUE:
                    return self._module(value) if word[at] == "m" else self._text(value)
            else:
                return any(self._script(name) for name in ([word] if word != "-" else read))
        return any(self._script(name) for name in read)

    def _script(self, name: str) -> bool:
        path = self._place(name)
        if path is not None and os.path.isdir(path):  # noqa: PTH112
            self._all_of(path)
            path = path / "__main__.py"
        if path is None or not os.path.isfile(path):  # noqa: PTH113
            return False
        if path.suffix == ".py":
            self.found.scripts.append(path)
        else:
            self.found.files.append(path)
            self.found.texts.append(path.read_text(encoding="utf-8", errors="replace"))
        return True

    def _module(self, name: str) -> bool:
        if not all(part.isidentifier() for part in name.split(".")):
            return False
        inner = f"{name}.__main__"
        own = [item for item in (name, inner) if source_of(self.root, item) is not None]
        if self._elsewhere() or own or name.partition(".")[0] in sys.stdlib_module_names:
            self.found.modules += own
        else:
            self.found.modules.append(name)
        return self.folder is not None

    def _text(self, text: str) -> bool:
        self._elsewhere()
        self.found.texts.append(text)
        return self.folder is not None

    def _elsewhere(self) -> bool:
        """Whether Python looks for modules in another folder first: all that lies there counts then."""
        if self.folder is None or self.folder == self.root:
            return False
        self.found.scripts += [path for path in _files_in(self.folder) if path.suffix == ".py"]
        self._all_of(self.folder)
        return True

    def _of_inputs(self, words: Sequence[str]) -> None:
        """Python of which the command doesn't tell what it runs: the sources among the inputs. Raises StepError."""
        sources = [item for item in self.step.inputs if item.endswith(".py")]
        if not sources:
            said = redact.hide(" ".join(words), self.step.secrets)[:80]
            raise StepError(
                f"step {self.step.name}: what `{said}` runs can't be told from its command, so that a change of it "
                "would not count",
                hint="name the file in inputs: [FILE.py], or write python FILE.py with its path from the project",
            )
        found = [Path(os.path.normpath(self.root / item)) for item in sources]
        self.found.scripts += [path for path in found if path.is_file()]

    def _place(self, name: str) -> Path | None:
        if self.folder is None and not name.startswith("/"):
            return None
        return Path(os.path.normpath((self.folder or self.root) / name))  # a link keeps its own name

    def _file(self, name: str) -> None:
        """What a word names: a file, a folder of the project, the files that a pattern matches."""
        folder = self.folder or self.root
        path = Path(os.path.normpath(folder / name))
        if not name or "\0" in name or str(path) in self._inputs:
            return
        if os.path.isfile(path):  # noqa: PTH113
            (self.found.scripts if path.suffix == ".py" else self.found.files).append(path)
        elif path != self.root and path.is_relative_to(self.root) and os.path.isdir(path):  # noqa: PTH112
            self._all_of(path)
        elif self.is_line and re.search(r"[*?\[]", name) and "**" not in name and not name.startswith("/"):
            matched = (item for item in sorted(folder.glob(name)) if item.is_file())
            self.found.files += [item for item in matched if str(item) not in self._inputs]

    def _all_of(self, folder: Path) -> None:
        if folder != self.root:
            self.found.files += [path for path in _files_in(folder) if str(path) not in self._inputs]


def _files_in(folder: Path) -> Iterator[Path]:
    """All of a folder but what is hidden, compiled or a result."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NO_FILES and not name.startswith("."))
        if not {*Path(path).parts} & {*_NO_FILES}:
            yield from (Path(path) / name for name in sorted(names) if (Path(path) / name).is_file())


def _tokens(line: str) -> Iterator[tuple[str, bool]]:
    """The words and signs of a line for bash; of one that bash can't read either, roughly."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        found = [*lexer]
    except ValueError:
        found = re.findall(r"[();<>|&\n`]+|[^\s();<>|&`'\"]+", line)
    for token in found:
        if token and not token.strip(_SIGNS):
            yield from ((sign, True) for sign in _SIGN.findall(token))
        else:
            yield token, False
