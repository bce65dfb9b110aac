"""The command that a hint names installs into the very environment, whoever made it."""

from __future__ import annotations

import sys

import pytest

from trainers.core import errors


@pytest.mark.parametrize(
    ("has_pip", "said"),
    [(True, "/env/bin/python -m pip install torch"), (False, "uv pip install --python /env/bin/python torch")],
)
def test_pip_where_the_environment_has_it_else_uv(monkeypatch: pytest.MonkeyPatch, has_pip: bool, said: str) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr(errors, "_has_pip", lambda: has_pip)
    assert errors.install("torch") == said
