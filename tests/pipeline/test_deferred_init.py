"""A package whose `__init__` waits until something is asked that it alone defines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.tracking.deferred_init import defer_init

NAME = "paceline_deferred"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its name. ``__init__`` imports ``heavy``; ``light`` imports nothing."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(f"from {NAME} import heavy\nvalue = heavy.value\n")
    (folder / "heavy.py").write_text("value = 7\n")
    (folder / "light.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield NAME
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_a_module_is_imported_without_what_init_imports(package: str) -> None:
    defer_init(package)
    assert importlib.import_module(f"{package}.light").value == 1
    assert f"{package}.heavy" not in sys.modules


def test_what_init_defines_is_there_when_it_is_asked_for(package: str) -> None:
    defer_init(package)
    assert importlib.import_module(package).value == 7
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module(package).nothing


def test_a_module_is_found_as_an_attribute(package: str) -> None:
    defer_init(package)
    assert importlib.import_module(package).light.value == 1
    assert f"{package}.heavy" not in sys.modules


def test_a_package_that_is_imported_already_or_not_there_is_left_alone(package: str) -> None:
    imported = importlib.import_module(package)
    defer_init(package)
    assert sys.modules[package] is imported
    defer_init("paceline_is_not_there")
    assert "paceline_is_not_there" not in sys.modules
