"""The samplers of ``search=NAME``: one module each, imported by name. docs/search.md shows how to add one.

A module has the settings, and ``sampler(config, space, seed)``, which returns the Optuna sampler of one trial. The seed
is the trial's own, so that the order of requests doesn't matter.
"""
