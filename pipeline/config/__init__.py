"""Hydra configuration: schemas, composition, and checks whose messages say how to correct a mistake."""
