"""A configured run brought to result.json: data, key and folder looked up, attempts, report, record.

Public face: ``configured_run``, ``complete`` (do it) and ``dry_run`` (say what would be done).
"""
