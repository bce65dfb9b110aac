"""Runs on disk: the run folder, its journal, result, provenance and state. Starts nothing.

Entry points: ``folder.RunFolder``, ``index`` (all runs), ``status`` (the progress of one), ``result``, ``acceptance``.
"""
