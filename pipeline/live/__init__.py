"""Views of runs under way.

Their state (``run_state``, ``sweep_state``), its drawing (``views``), the thread that draws (``screen``), and notices
of an end (``notices``).
"""
