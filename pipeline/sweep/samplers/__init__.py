"""The ways to search: one module each, found by its name. docs/search.md shows how to add one.

A sampler's module has its settings, a dataclass derived from SearchConfig, and ``sampler(config, space, seed)``: the
Optuna sampler of one trial, made anew for each with a seed of its own, so that what is asked doesn't depend on who
asked before. These modules import optuna (0.3 s), so only a search that runs imports the one it takes.
"""
