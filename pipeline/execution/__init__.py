"""Bring a configured run to result.json: look up key and folder, make attempts, evaluate, record.

``run`` builds a run from its configuration and judges its folder, ``complete`` makes a run, and ``dry_run`` describes
what would be done.
"""
