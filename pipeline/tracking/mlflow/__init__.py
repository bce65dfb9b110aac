"""MLflow: its store, what is written into it and fetched from it, its registry of models, its server and pages."""
