"""Data packs, which nodes memory-map. ``store`` creates or finds a pack, ``request.find`` only looks it up.

Entry points: ``store`` (fetch, find, refuse), ``request`` (the inputs of a pack), ``manifest`` (Manifest, Pack). Import
each separately: a finished run doesn't need the store.
"""
