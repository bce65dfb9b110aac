"""Runs under way, for who watches them: what is known (``run_state``, ``sweep_state``), how it looks (``run_view``,
``sweep_view``), the thread that draws it (``screen``), and notices of an end (``notices``)."""
