"""Data packs, which nodes memory-map. ``fetch`` makes or finds one, ``find`` only looks, ``refuse`` only refuses."""

from pipeline.data.manifest import Manifest, Pack
from pipeline.data.progress import OnProgress
from pipeline.data.store import fetch, find, refuse

__all__ = ["Manifest", "OnProgress", "Pack", "fetch", "find", "refuse"]
