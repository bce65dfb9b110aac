"""Runs on disk: the folder of one (``folder``), all of them (``index``), the progress of one (``status``). Starts
nothing."""
