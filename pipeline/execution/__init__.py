"""A configured run brought to result.json: key and folder looked up, attempts, report, record.

Public face: ``located`` (is it finished?), ``configured_run``, ``complete`` (do it) and ``dry_run`` (say what would be
done).
"""
