"""The samplers of a search: one module each, imported by name. docs/search.md shows how to add one.

A sampler's module contains its settings, a dataclass derived from SearchConfig, and ``sampler(config, space, seed)``,
which returns the Optuna sampler of one trial. Each trial gets a new sampler with its own seed, so its values don't
depend on the order of requests. The modules import optuna (0.3 s), so a search imports only the one it uses.
"""
