"""The report of a finished run, by scikit-learn in a process of its own, and the key that says when it is stale.

Public face: ``python -m pipeline.evaluation`` and ``report_key.stale_because``.
"""
