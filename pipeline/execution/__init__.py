"""A configured run brought to result.json: key and folder looked up, attempts, report, record.

``run`` is what a training is started from, ``finished`` judges a run folder, ``complete`` makes a run and ``dry_run``
says what would be done.
"""
