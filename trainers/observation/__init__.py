"""Observation of processes that run user-defined code: what they read, and which of it their key lacks.

``observer/`` travels into each observed process and notes its accesses, ``processes`` starts it there, ``notes`` reads
what was noted, ``unkeyed`` finds the files of the project that the key lacks, and ``record`` keeps all other inputs, by
which a finished result is later found out of date. Standard library only, as the controller imports it, too.
"""
