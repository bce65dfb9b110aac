"""What is known of runs on disk: the run folder, its journal, result, provenance and state. Starts nothing.

Public face: ``folder.RunFolder``, ``index`` (all runs), ``status`` (how far one has come), ``result``, ``acceptance``.
"""
