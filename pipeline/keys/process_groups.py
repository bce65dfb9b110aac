"""Whether a script asks for a process group: only then it starts several ranks unasked."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.places import MODULES
from pipeline.keys.script_files import find
from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig, words

_FRAMEWORKS = (
    "accelerate|colossalai|composer|deepspeed|detectron2|fairscale|horovod|ignite|lightning|lightning_fabric|megatron|"
    "mmengine|pytorch_lightning|torch_xla|torchrec|torchtitan|torchtune|trl"
)
_CODE = re.compile(  # in a source
    rf"\b(torch\.distributed|torch import distributed|init_process_group|init_device_mesh|DistributedDataParallel|"
    rf"FullyShardedDataParallel|fully_shard|DistributedSampler|RANK|LOCAL_RANK|WORLD_SIZE)\b"
    rf"|^\s*(import|from)\s+({_FRAMEWORKS})\b",
    re.MULTILINE,
)
# transformers alone doesn't make several ranks useful, its Trainer does
_TRAINER = re.compile(r"^\s*(import|from)\s+transformers\b.*?\b\w*Trainer\b", re.MULTILINE | re.DOTALL)
# in the command, its arguments and variables
_WORDS = re.compile(r"(?<![a-z])(accelerate|ddp|deepspeed|distributed|fsdp|horovodrun|torchrun|torch\.distributed)\b")
_OF_PACELINE = (*(f"{name}/" for name in MODULES), "paceline.py")


def uses_process_group(resolved: Mapping[str, Any], root: Path) -> bool:
    """Return True if the configured script uses a process group: only then does it start several ranks unasked.

    False if its files don't exist. ``root`` is the project folder.
    """
    python_path = str((resolved["cluster"]["env"] or {}).get("PYTHONPATH") or "").split(":")
    try:
        script = ScriptConfig(**resolved["program"])
        if _WORDS.search("\n".join(map(str, (*script.command, *words(script.args), *script.env))).lower()):
            return True
        files = find(script, root=root, must_exist=False)
        sources = files.closure([*filter(None, python_path)]).sources if files.file is not None else {}
        own = [name for name in sources if name.endswith(".py") and not name.startswith(_OF_PACELINE)]
        return any(_names_process_group(sources[name]) for name in own)
    except (UsageError, ConfigError, OSError):  # the start of the run reports it
        return False


def _names_process_group(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not (_CODE.search(text) or _TRAINER.search(text)):  # a cheap first look: most files name nothing of it
        return False
    code = _without_comments(text)
    return _CODE.search(code) is not None or _TRAINER.search(code) is not None


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
