"""Bring a configured run to result.json: look up key and folder, make attempts, evaluate, record.

``run`` is what a training starts from, ``finished`` judges a run folder, ``complete`` makes a run, and ``dry_run`` says
what would be done.
"""
