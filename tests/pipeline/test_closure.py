"""The import closure: at second hand, of several entries, and nothing that the run doesn't import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from pipeline.keys.import_closure import import_closure

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, **modules: str) -> None:
    for name, text in modules.items():
        path = root / "app" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [root / "app", *(path.parent for path in root.rglob("*.py"))]:
        (folder / "__init__.py").touch()


def names(root: Path, *entries: str) -> list[str]:
    return list(import_closure(root, entries).digests)


def test_follows_imports_at_second_hand_and_inside_functions(tmp_path: Path) -> None:
    write(
        tmp_path,
        main="def f():\n    from app import first\n",
        first="from .deep.second import x\n",
        deep__second="x = 1\n",
        unrelated="y = 2\n",
    )
    assert names(tmp_path, "app.main") == [
        "app/__init__.py",
        "app/deep/__init__.py",
        "app/deep/second.py",
        "app/first.py",
        "app/main.py",
    ]


def test_of_modules_that_are_imported_by_name_only_those_that_are_entries_count(tmp_path: Path) -> None:
    write(tmp_path, main="import sys\nfrom importlib import import_module\nimport_module(sys.argv[1])\n")
    write(tmp_path, one="import app.two\n", two="")
    package, main = "app/__init__.py", "app/main.py"
    assert names(tmp_path, "app.main") == [package, main]
    assert names(tmp_path, "app.main", "app.one") == [package, main, "app/one.py", "app/two.py"]


def test_a_module_named_by_a_bare_string_counts(tmp_path: Path) -> None:
    write(tmp_path, main='import importlib\nimportlib.import_module("app.one")\n', one="")
    assert "app/one.py" in names(tmp_path, "app.main")


def test_a_docstring_that_begins_with_a_modules_name_is_no_import(tmp_path: Path) -> None:
    write(tmp_path, main='"""app.one: what it is not."""\n\ndef f():\n    "app.one"\n', one="")
    assert "app/one.py" not in names(tmp_path, "app.main")


def test_third_party_packages_are_named_without_the_standard_library(tmp_path: Path) -> None:
    write(tmp_path, main="import os.path\nimport torch.nn\nfrom numpy import array\n")
    assert sorted(import_closure(tmp_path, "app.main").versions) == ["numpy", "torch"]


def test_a_missing_entry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^app\.gone is not a module under"):
        import_closure(tmp_path, "app.gone")


def test_sources_are_not_parsed_twice_but_edits_new_files_and_other_choices_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, main="from app import first, later\n", first="", one="", two="")
    package, main, first = "app/__init__.py", "app/main.py", "app/first.py"
    assert names(tmp_path, "app.main", "app.one") == [package, first, main, "app/one.py"]
    with monkeypatch.context() as without:
        without.setattr(ast, "parse", None)
        assert names(tmp_path, "app.main", "app.one") == [package, first, main, "app/one.py"]
        assert names(tmp_path, "app.main") == [package, first, main]
    write(tmp_path, first="import app.two\n", later="")
    assert names(tmp_path, "app.main", "app.one") == [package, first, "app/later.py", main, "app/one.py", "app/two.py"]


MODULES = (
    "trainers.classifier",
    "trainers.models.small_cnn",
    "trainers.optimizers.sgd",
    "trainers.schedules.constant",
    "trainers.strategies.ddp",
)


def test_the_trainer_imports_torch_alone_and_only_the_model_it_was_given() -> None:
    closure = import_closure(ROOT, MODULES)
    assert sorted(closure.versions) == ["torch"]
    assert "trainers/models/small_cnn.py" in closure.digests
    others = {"trainers/models/resnet18.py", "trainers/strategies/fsdp.py", "trainers/optimizers/adam.py"}
    assert not others & {*closure.digests}


@pytest.mark.parametrize("damage", ['{"', "3", None])
@pytest.mark.parametrize("name", ["imports", "installed"])
def test_what_was_remembered_and_is_damaged_is_read_anew(tmp_path: Path, name: str, damage: str | None) -> None:
    (tmp_path / "own.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("import numpy\n")
    found = import_closure(tmp_path, "own")
    assert (sorted(found.digests), sorted(found.versions)) == (["helper.py", "own.py"], ["numpy"])
    remembered = tmp_path / ".paceline" / f"{name}.json"
    whole = remembered.read_text()
    remembered.write_text(damage if damage is not None else whole.replace("numpy", "torch"))
    assert import_closure(tmp_path, "own") == found
    assert remembered.read_text() == whole
    remembered.unlink()
    remembered.mkdir()
    assert import_closure(tmp_path, "own") == found
