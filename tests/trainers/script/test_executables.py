"""What a host is told of a program that it can't start."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.script.command import why_not_executable


def why(folder: Path, head: bytes) -> str:
    (folder / "program").write_bytes(head)
    return why_not_executable(folder / "program", "/usr/bin:/bin")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"#!/bin/sh\necho", ""),
        (b"\x7fELF\2\1\1", ""),
        (b"#! /usr/bin/env -S sh -e\n", ""),
        (b"#!/no/such/python -u\n", "its first line names /no/such/python, which isn't there"),
        (b"#!/usr/bin/env nosuch\n", "its first line names nosuch, which isn't in PATH"),
        (b"#!/bin/sh\r\necho", "ends with a carriage return; save it with the line ends of Unix"),
        (b"#!\n", "names no interpreter"),
        (b"", "it is empty"),
        (b"echo hello\n", "no program of this system, and has no first line that names an interpreter"),
    ],
)
def test_a_first_line_names_an_interpreter_that_is_there(tmp_path: Path, head: bytes, said: str) -> None:
    told = why(tmp_path, head)
    assert (said in told) if said else not told
