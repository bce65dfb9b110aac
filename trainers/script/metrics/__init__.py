"""The metrics of a script: what it logs, writes or prints becomes rows of metrics.jsonl.

``recorder`` asks each source for new rows (``sources``: files and lines; ``tensorboard``: event files) and appends
them to the ``metrics_file``. A script that has reported none by its end is searched for ``printed`` metrics.
"""
