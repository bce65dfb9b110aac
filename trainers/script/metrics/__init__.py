"""The metrics of a script: what it logs, writes or prints becomes rows of metrics.jsonl."""
