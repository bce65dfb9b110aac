"""Words of the command line that are no overrides: flags of a verb, of doit and of Hydra, and mistakes."""
