"""What every other package stands on: specs, errors, files, processes, threads, secrets, options.

Public face: ``specs`` and ``cluster`` (the vocabulary), ``errors``, ``files`` and ``documents`` (atomic, sealed),
``process`` (the one place that starts processes), ``threads`` (the one that starts threads), ``signals``, ``redact``.
"""
