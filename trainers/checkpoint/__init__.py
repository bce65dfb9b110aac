"""Checkpoints (``folder``), and the plain weights of a network that stock torch loads (``weights``)."""
