"""The evaluation report of a finished run, made by scikit-learn in a separate process, and its key.

Entry points: ``python -m pipeline.evaluation`` and ``stored_report.stale_because``.
"""
