"""Foundations of the controller half: specs, errors, files, processes, secrets, options.

Entry points: ``specs`` (shared data types), ``errors``, ``files`` and ``documents`` (atomic and sealed files),
``redact``, and ``processes``, which starts all processes and threads and handles signals.
"""
