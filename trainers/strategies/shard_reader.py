"""The shards of a checkpoint as torch.distributed.checkpoint reads them, but for its pickle: ``.metadata`` may come
from anybody's run folder or host, and Python's unpickler runs what it says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMED = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}
"""What the metadata of tensors is made of; that of other objects, which are pickles too, isn't among it."""


class ShardReader(FileSystemReader):
    """Reads shards of tensors, and nothing else."""

    def read_metadata(self) -> Metadata:  # torch would look for one of each rank
        """Raises UnpicklingError: it holds what no metadata of tensors does."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Plain(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
        if any("/" in info.relative_path for info in (found.storage_data or {}).values()):
            raise pickle.UnpicklingError("a file of it lies elsewhere")
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _NAMED and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of tensors has")
        return super().find_class(module, name)
