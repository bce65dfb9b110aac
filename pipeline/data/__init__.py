"""Data packs, which a node memory-maps. ``fetch`` makes or finds one, ``find`` only looks."""

from pipeline.data.manifest import Manifest, Pack
from pipeline.data.progress import OnProgress
from pipeline.data.store import fetch, find

__all__ = ["Manifest", "OnProgress", "Pack", "fetch", "find"]
