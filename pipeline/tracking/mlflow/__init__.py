"""MLflow: its store, writing and fetching records, its model registry, its server and web pages."""
