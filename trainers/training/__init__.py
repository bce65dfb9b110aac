"""The built-in training: ``session`` (from a run folder to its results) uses ``loop``, and that ``step``."""
