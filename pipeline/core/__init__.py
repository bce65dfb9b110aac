"""What every other package stands on: specs, errors, files, processes, secrets, options.

Public face: ``specs`` (the vocabulary), ``errors``, ``files`` and ``documents`` (atomic, sealed), ``redact``, and in
``processes`` the one place that starts processes, the one that starts threads, and ``signals``.
"""
