"""Files that a script's code or arguments name, that lie in the project, and that a run's copy of the code lacks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.core.places import MODULES
from pipeline.keys.script_files import ScriptFiles
from trainers.script.settings import words

_FILE = re.compile(r"[\w@+][\w./@+ -]{0,200}\.\w{1,12}")


def lacking(files: ScriptFiles, sources: Mapping[str, Path], section: Mapping[str, Any]) -> list[str]:
    """As ``program.inputs`` takes them. ``sources`` is the snapshot, ``section`` the script's configuration.

    A first run ends at the first of them that it opens, so that a user would learn of one an attempt.
    """
    found: dict[str, None] = {}
    for text in sorted({*words(section.get("args")), *_texts(sources)}):
        for folder in (files.folder, files.root) if _FILE.fullmatch(text) else ():
            path = folder / text
            if ".." in path.parts or not path.is_file():
                continue
            name = path.relative_to(files.root if path.is_relative_to(files.root) else files.folder).as_posix()
            is_there = path in sources.values() or any(fnmatch(name, one) for one in section.get("outputs") or ())
            if not is_there:
                found[name] = None
            break
    return [*found]


def _texts(sources: Mapping[str, Path]) -> Iterator[str]:
    for name, path in sources.items():
        if name.endswith(".py") and name.partition("/")[0].removesuffix(".py") not in MODULES:
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
