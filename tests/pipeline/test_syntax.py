"""A file counts by what it does: comments and layout don't, any statement and docstring does."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from pipeline.keys import readings
from pipeline.keys.import_closure import import_closure, matches
from tests.integration.commands import ROOT

RUNS = (
    ("classifier", "models.small_cnn", "optimizers.sgd", "schedules.constant", "strategies.ddp"),
    ("classifier", "models.whitened_cnn", "optimizers.airbench_muon", "schedules.triangle"),
    ("classifier", "models.resnet18", "optimizers.adam", "schedules.one_cycle", "strategies.fsdp"),
    ("measuring.measure", "models.resnet50", "schedules.step", "optimizers.muon"),
    ("models.own", "optimizers.own", "optimizers.torch"),
    ("measuring.measure", "models.torchvision", "optimizers.adamw", "schedules.cosine"),
    ("script.start",),
    ("script.metrics.recorder",),
    ("classifier", "data.encoded"),
    ("data.torchvision_images",),
    ("exporting",),
    ("predicting",),
    ("ranks",),
    ("torchrun_options",),
    ("call",),
    ("torchrun",),
    ("contract.host_facts", "contract.records"),  # of the agent
)


def digest(text: str) -> str:
    return readings.digest(ast.parse(text), text.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('"""Doc."""\ndef f(x):\n    return x+1', "'Doc.'\n# more\ndef f( x ):\n    return (x + 1)  # why"),
        ("class A:\n    '''Doc.'''\n    b = 1", "class A():\n    'Doc.'\n    b = 1"),
        ("del (a, b)", "del a, b"),
        ("x = 'a' 'b'", 'x = u"ab"'),
        ("x = 0XFF; y = 1_000", "x = 255\ny = 1000"),
        ("async def f():\n    ...", "async def f(): ..."),
        ("import torch\ntorch.jit.script(f)", "import torch  # why\n\ntorch.jit.script(f)  # compiled"),
        ("text.tokenize(inspect.getsource(f))", "# why\ntext.tokenize(inspect.getsource(f))"),
        ("x = f(1)", "x = f(1)  # type: ignore[no-untyped-call]"),
    ],
)
def test_what_a_formatter_makes_of_a_source_is_the_same(one: str, other: str) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 'a'", "x = b'a'"),
        ("x = 'a b'", "x = 'a  b'"),
        ("return_ = None", "return_ = ..."),
        ("f(a, *b)", "f(*b, a)"),
        ("f(**a)", "f(a=a)"),
        ("x = a[1:]", "x = a[:1]"),
        ("a < b", "a <= b"),
        ("{1: 2, **a}", "{**a, 1: 2}"),
        ("def f(*, a=None, b): ...", "def f(*, a, b=None): ..."),
        ("def f(a, /): ...", "def f(a): ..."),
        ("x = f'{a}'", "x = f'{a!r}'"),
        ("x = f'{a:3}'", "x = f'{a:4}'"),
        ("'doc'\nx = 'a'", "x = 'b'"),
        ("if a:\n    b\nc", "if a:\n    b\n    c"),
        ("x = -0.0", "x = 0.0"),
        ("from . import a", "from .. import a"),
        ("match a:\n    case None: ...", "match a:\n    case _: ..."),
        ("f()\nb'bytes'", "f()"),
        ("def f():\n    'Of f.'", "def f():\n    'Of F.'"),
        ("class A:\n    b: int\n    'Of b.'", "class A:\n    b: int\n    'About b.'"),  # pydantic reads it
        ("def f(x):\n    # type: (Tensor) -> Tensor\n    g", "def f(x):\n    # type: (int) -> Tensor\n    g"),
    ],
)
def test_what_python_takes_for_something_else_differs(one: str, other: str) -> None:
    assert digest(one) != digest(other)


def test_long_sums_deep_chains_and_large_numbers_have_a_digest() -> None:
    assert digest(" + ".join(["a"] * 900)) != digest(" + ".join(["a"] * 901))
    assert digest(f"x = 0x{'f' * 9000}") != digest(f"x = 0x{'f' * 9001}")


def test_every_syntax_of_this_python_has_its_own_digest() -> None:
    """Of the standard library's own grammar test: each top-level statement counts, none equals another by mistake."""
    source = Path(ast.__file__).read_text()
    tree = ast.parse(source)
    dumps = {ast.dump(node): readings.digest(ast.Module(body=[node], type_ignores=[]), b"") for node in _bare(tree)}
    assert len(dumps) > 100
    assert len({*dumps.values()}) == len(dumps)


def _bare(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that have no docstring and no ``del`` in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Return | ast.AugAssign | ast.Raise | ast.Assert | ast.For | ast.If):
            yield node


def write(root: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (root / "app").mkdir(parents=True, exist_ok=True)
        (root / "app" / f"{name}.py").write_text(text)
    (root / "app" / "__init__.py").touch()
    return root


def test_a_copy_that_differs_in_comments_alone_is_the_code_that_was_hashed(tmp_path: Path) -> None:
    root = write(tmp_path / "project", main="x = 1\n")
    found = import_closure(root, "app.main").digests
    copy = write(tmp_path / "copy", main="x = 1  # edited meanwhile\n")
    assert matches(root, copy, found)
    write(copy, main="x = 2\n")
    assert not matches(root, copy, found)
    write(copy, main="'Edited.'\nx = 1\n")
    assert not matches(root, copy, found)


def test_a_file_that_cannot_be_parsed_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, main="x = 1\ny = = 2\n")
    with pytest.raises(UsageError, match=r"^app/main\.py:2 can't be parsed: invalid syntax\n  try: "):
        import_closure(tmp_path, "app.main")
    write(tmp_path, main="x = '\0'\n")
    with pytest.raises(UsageError, match=r"^app/main\.py.* can't be parsed: .*null bytes"):
        import_closure(tmp_path, "app.main")


# ------------------------------------------------------------------ the node half itself, all of its files
@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "trainers", tmp_path / "trainers", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "paceline.py", tmp_path)
    return tmp_path


def closures(root: Path) -> list[dict[str, str]]:
    return [dict(import_closure(root, [f"trainers.{name}" for name in run]).digests) for run in RUNS]


def files(root: Path) -> list[Path]:
    return sorted((root / "trainers").rglob("*.py"))


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_comments_and_a_formatter_run_change_no_file_of_the_closure(project: Path) -> None:
    before = closures(project)
    for path in files(project):
        path.write_text(f"# a comment\n{path.read_text()}\n# another\n")
    assert closures(project) == before
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache", "--line-length", "50", str(project)]
    said = subprocess.run(ruff, capture_output=True, text=True, check=True).stdout
    assert "reformatted" in said
    assert closures(project) == before


@pytest.mark.long
def test_one_constant_in_any_file_changes_every_closure_that_has_it_and_no_other(project: Path) -> None:
    before = closures(project)
    missed = []
    for path in files(project):
        name, source = path.relative_to(project).as_posix(), path.read_text()
        path.write_text(changed_constant(source))
        seen = [old.get(name) != new.get(name) for old, new in zip(before, closures(project), strict=True)]
        if seen != [name in old for old in before]:
            missed.append(name)
        path.write_text(source)
    assert missed == []
    assert all(any(path.relative_to(project).as_posix() in old for old in before) for path in files(project))


def changed_constant(source: str) -> str:
    """The first number (else truth, else a new one) made another."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.lineno == node.end_lineno:
            lines = source.splitlines(keepends=True)
            line = lines[node.lineno - 1].encode()
            new = repr(not node.value if isinstance(node.value, bool) else node.value + 1).encode()
            lines[node.lineno - 1] = (line[: node.col_offset] + new + line[node.end_col_offset :]).decode()
            return "".join(lines)
    return f"{source}\n_NEW = 1\n"
