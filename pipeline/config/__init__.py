"""Hydra configuration: schemas, composition and the checks whose messages a person can act on."""
