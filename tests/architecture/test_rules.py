"""Rules of the structure that import-linter can't see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pipeline.cluster.launchers.settings import LAUNCHERS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "trainers").rglob("*.py")])


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _calls(path: Path) -> Iterator[str]:
    """What is called by its name, or by names with dots between them."""
    for node in _nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield _dotted(node.func)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def _offenders(allowed: set[str], *wanted: str) -> list[str]:
    found = [(path.relative_to(ROOT).as_posix(), call) for path in SOURCES for call in _calls(path)]
    return [f"{path}: {call}" for path, call in found if call in wanted and path not in allowed]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_processes_are_started_in_the_shell_and_the_agent_alone() -> None:
    starters = [f"subprocess.{name}" for name in ("Popen", "run", "call")]
    starters += [f"os.{name}" for name in ("system", "fork", "execv", "execvp")]
    starts = [f"host/{name}" for name in ("container", "environments", "hardware", "usage")]
    starts += [f"running/{name}" for name in ("processes", "start", "warm")]
    agent = {f"pipeline/cluster/agent/{name}.py" for name in starts}
    own = {
        "pipeline/core/processes/process.py",
        "pipeline/core/processes/guard.py",
        "trainers/script/start.py",
        "trainers/ranks.py",
        "trainers/torchrun.py",
    }
    assert _offenders({*own, *agent}, *starters) == []


@pytest.mark.slow
def test_threads_of_the_controller_are_started_in_one_module() -> None:
    starters = ("threading.Thread", "Thread", "threading.Timer", "Timer")
    ranks = {"trainers/training/session.py", "trainers/distributed/termination.py"}
    assert _offenders({"pipeline/core/processes/threads.py", "pipeline/cluster/agent/wire.py", *ranks}, *starters) == []
    assert list(_calls(ROOT / "pipeline/cluster/agent/wire.py")).count("threading.Thread") == 1, "in_thread"


def test_rank_variables_are_read_in_one_module() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == "trainers"
        for node in _nodes(path)
        if isinstance(node, ast.Constant) and node.value in ("RANK", "WORLD_SIZE")
    ]
    assert set(readers) == {"trainers/distributed/ranks.py"}


@pytest.mark.slow
def test_launchers_are_asked_for_capabilities_and_not_by_name() -> None:
    """Of a comparison with one launcher's name nobody thinks who adds another."""
    compared = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in SOURCES
        for node in _nodes(path)
        if isinstance(node, ast.Compare)
        and any("launcher" in vars(part).get("attr", vars(part).get("id", "")) for part in ast.walk(node))
        and re.search(r"launcher\W* (==|!=|in) ", ast.unparse(node))
        and any(isinstance(part, ast.Constant) for part in ast.walk(node))
    ]
    assert compared == []


def test_launchers_do_not_know_each_other() -> None:
    """Nor does what they share, so none is loaded with another."""
    modules = [f"pipeline.cluster.launchers.{name}" for name in LAUNCHERS.names()]
    imports = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in (ROOT / "pipeline/cluster/launchers").rglob("*.py")
        for node in _nodes(path)
        if isinstance(node, ast.ImportFrom)
        and any(f"{node.module}.{name.name}" in modules or node.module in modules for name in node.names)
    ]
    assert len(modules) >= 5
    assert imports == []


def test_dodo_holds_task_creators_only() -> None:
    tree = ast.parse((ROOT / "dodo.py").read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(name.startswith("task_") for name in functions)
    assert not any(isinstance(node, ast.ClassDef) for node in tree.body)


@pytest.mark.parametrize("words", [["list"], ["help", "train"], []])
def test_looking_around_imports_neither_torch_nor_mlflow_nor_hydra(words: list[str]) -> None:
    code = (
        f"import sys; from doit.doit_cmd import DoitMain; sys.argv = ['doit', *{words!r}]\n"
        "try: code = DoitMain().run(sys.argv[1:])\n"
        "except SystemExit as left: code = left.code\n"
        "slow = ('torch', 'mlflow', 'hydra', 'sklearn', 'optuna'); "
        "print('LOADED', code, [name for name in slow if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED 0 []"


def test_the_start_of_a_run_loads_nothing_of_other_kinds_of_runs() -> None:
    others = {
        *("hydra", "numpy", "pipeline.steps", "pipeline.sweep", "pipeline.runs.index", "trainers.script.workdir"),
        *("pipeline.cluster.agent.running", "pipeline.cluster.launchers.granted_launcher"),
    }
    code = "import sys, pipeline.cli.finished, pipeline.config.memo, pipeline.cli.commands.train"
    shown = f"print(sorted({others!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {shown}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_no_rank_unpickles_what_comes_over_the_network() -> None:
    """torch's exchange of objects runs what somebody on the network puts into it."""
    unpickles = re.compile(r"(gather|broadcast|scatter|send|recv)_object(_list)?$|pickle\.loads?$")
    found = [(path.name, call) for path in SOURCES for call in _calls(path) if unpickles.search(call)]
    assert found == []
