"""Runs under way, for their viewers: the state (``run_state``, ``sweep_state``), its view (``views``), the thread that
draws it (``screen``), and notices of an end (``notices``).
"""
