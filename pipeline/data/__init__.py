"""Data packs, which nodes memory-map. ``store`` makes or finds one, ``request.find`` only looks.

Public face: ``store`` (fetch, find, refuse), ``request`` (what a pack is made of), ``manifest`` (Manifest, Pack).
Each is imported by itself: a run that is finished needs no store.
"""
