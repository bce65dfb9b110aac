"""Bring a configured run to result.json: ``run`` builds a run from its configuration and judges its folder,
``complete`` makes a run, and ``dry_run`` describes what would be done."""
