"""The samplers of a search: one module each, imported by name. docs/search.md shows how to add one: its settings, and
``sampler(config, space, seed)``, which returns the Optuna sampler of one trial, independent of the order of requests.
"""
