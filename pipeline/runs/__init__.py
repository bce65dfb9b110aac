"""Runs on disk, read and written without starting anything: the folder of a run (``folder``), the list of all runs
(``index``), the state of a run (``status``)."""
