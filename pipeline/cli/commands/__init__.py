"""The actions of the verbs, one module per family, imported when one of its verbs runs (``pipeline.cli.verbs``)."""
