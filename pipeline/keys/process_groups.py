"""Whether a script uses a process group: only then does it start several ranks unasked."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.places import MODULES
from pipeline.keys import script_files
from trainers.core.config import ConfigError
from trainers.script.settings import words

_FRAMEWORKS = (
    "accelerate|colossalai|composer|deepspeed|detectron2|fairscale|horovod|ignite|lightning|lightning_fabric|megatron|"
    "mmengine|pytorch_lightning|torch_xla|torchrec|torchtitan|torchtune|trl"
)
_CODE = re.compile(
    rf"\b(torch\.distributed|torch import distributed|init_process_group|init_device_mesh|DistributedDataParallel|"
    rf"FullyShardedDataParallel|fully_shard|DistributedSampler|RANK|LOCAL_RANK|WORLD_SIZE)\b"
    rf"|^\s*(import|from)\s+({_FRAMEWORKS})\b",
    re.MULTILINE,
)
_TRAINER = re.compile(r"^\s*(import|from)\s+transformers\b.*?\b\w*Trainer\b", re.MULTILINE | re.DOTALL)
_WORDS = re.compile(r"(?<![a-z])(accelerate|ddp|deepspeed|distributed|fsdp|horovodrun|torchrun|torch\.distributed)\b")
_OF_FILES = ("script", "command", "workdir", "inputs", "outputs")
_PACELINE = tuple(f"{name}/" for name in MODULES)


def uses_process_group(resolved: Mapping[str, Any], root: Path) -> bool:
    """Return True if the configured script uses a process group; False if its files don't exist.

    ``root`` is the project folder.
    """
    section = resolved["program"]
    python_path = str((resolved["cluster"]["env"] or {}).get("PYTHONPATH") or "").split(":")
    if not (section.get("script") or section.get("command")):
        return False
    try:
        given = [*(section.get("command") or ()), *words(section.get("args")), *(section.get("env") or ())]
        if _WORDS.search("\n".join(map(str, given)).lower()):
            return True
        paths: dict[str, Any] = {
            name: section.get(name) or ([] if name in ("command", "inputs", "outputs") else "") for name in _OF_FILES
        }
        files = script_files.find(root=root, data=None, module=section.get("module"), **paths)
        sources = files.closure([*filter(None, python_path)]).sources if files.file is not None else {}
        own = [name for name in sources if name.endswith(".py") and not name.startswith((*_PACELINE, "paceline.py"))]
        return any(_names_process_group(sources[name]) for name in own)
    except (UsageError, ConfigError, OSError):  # the start of the run reports it
        return False


def _names_process_group(path: Path) -> bool:
    def named(text: str) -> bool:
        return _CODE.search(text) is not None or _TRAINER.search(text) is not None

    text = path.read_text(encoding="utf-8", errors="replace")
    return named(text) and named(_without_comments(text))  # the first look is cheap; most files name nothing of it


def _without_comments(text: str) -> str:
    """Blank out comments: they don't count in the key, so they must not decide the number of ranks."""
    lines = text.splitlines(keepends=True)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = f"{lines[row - 1][:column]}\n"
    except (tokenize.TokenError, SyntaxError):
        return text
    return "".join(lines)
