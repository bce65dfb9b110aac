"""From a configuration to result.json: ``run`` gives a run its key and judges its folder, ``complete`` makes the run,
and ``dry_run`` describes what would be done."""
