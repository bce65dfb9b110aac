"""What both halves agree on stands once, in trainers/contract, and travels with the agent."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from trainers import ranks
from trainers.contract import run_folder, variables

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "trainers" / "contract"
FILES = {value for name, value in vars(run_folder).items() if name.isupper() and Path(value).suffix}
VARIABLES = {value for name, value in vars(variables).items() if name.isupper()}
MANIFEST = {run_folder.MANIFEST}  # data packs and archives have one each
HYDRAS = {run_folder.CONFIG_YAML}  # conf/ has one of that name
ALONE = {"trainers/ranks.py": "its text runs by itself, before anything of a project can be imported"}


def strings(path: Path) -> Iterator[str]:
    """All text constants of a module but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def modules() -> list[Path]:
    product = (path for half in ("pipeline", "trainers", "hydra_plugins") for path in (ROOT / half).rglob("*.py"))
    return sorted(path for path in product if CONTRACT not in path.parents and "template" not in path.parts)


def test_a_name_of_the_contract_stands_nowhere_else_as_a_literal() -> None:
    names = (FILES - MANIFEST) | VARIABLES
    holding = [path for path in modules() if any(name in path.read_text(encoding="utf-8") for name in names)]
    found = {path.relative_to(ROOT).as_posix(): names.intersection(strings(path)) for path in holding}
    assert {
        (path, name)
        for path, literals in found.items()
        for name in literals - (HYDRAS if path.startswith(("pipeline/config/", "pipeline/cli/")) else set())
        if path not in ALONE
    } == set()


def test_the_parent_of_ranks_which_runs_by_itself_spells_its_mark_as_the_contract_does() -> None:
    assert ranks.MARKED == variables.MARK_FILE


def test_the_module_for_scripts_which_is_used_alone_spells_its_variables_as_the_contract_does() -> None:
    assert (paceline.LOG, paceline.RUN_DIR, paceline.OUTPUTS) == (variables.LOG, variables.RUN_DIR, variables.OUTPUTS)


@pytest.mark.parametrize("path", sorted(CONTRACT.glob("*.py")), ids=lambda path: path.stem)
def test_the_contract_needs_python_3_9_and_the_standard_library_alone(path: Path) -> None:
    import sys

    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name.partition(".")[0] for name in names if not name.startswith("trainers.contract")}
    assert outside <= sys.stdlib_module_names | {"__future__"}
