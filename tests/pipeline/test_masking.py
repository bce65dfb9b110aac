"""The streams of this process."""

from __future__ import annotations

import io
import sys

import pytest

from pipeline.core import masking


def test_what_a_persons_code_closes_takes_what_is_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(taken))
    monkeypatch.setattr(masking, "_known", set())
    masking.begin()
    sys.stdout.close()
    print("more", flush=True)
    assert taken.getvalue() == b"more\n"
