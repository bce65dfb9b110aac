"""Data packs, which nodes memory-map. ``store`` creates or finds a pack; ``request`` is what its name stands for."""
