"""Names of the files and folders in a run folder, ``runs/<key>/``. docs/run-folder.md describes their content."""

from __future__ import annotations

# Inputs of a run; written by the controller before the first launch.
KEY = "key.json"  # the parts of the content key
CONFIG = "config.json"  # the resolved configuration
CONFIG_YAML = "config.yaml"  # the same for users
PROVENANCE = "provenance.json"  # commit, command line, environment of each host
CHANGES = "changes.patch"  # from the commit to the working tree
CODE = "code"  # the snapshot that ranks import
SCRIPT_OUTSIDE = "_script"  # in the snapshot: the files of a script that lies outside of the project
DATA = "data"  # a link to the data pack

# Progress; written by the controller.
PLAN = "plan.json"  # commands, environments and hosts of the last attempt
JOURNAL = "journal.jsonl"  # state changes
ATTEMPTS = "attempts"  # a folder for each attempt: logs and exit codes
SYSTEM_METRICS = "system_metrics.jsonl"  # processors, memory, GPUs, network
RESULT = "result.json"  # written last: the end of a good run
TRACKING = "tracking.json"  # ids of the run in MLflow and other trackers

# Written by rank 0.
METRICS = "metrics.jsonl"
DIGESTS = "digests.jsonl"  # of the state at every trainer.digests steps, of all ranks
OPERATORS = "operators-rank{rank}.jsonl"  # of a replay by `doit diff`: what each operator gave
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"  # figures of the whole run, written last
DEPENDENCIES = "dependencies.json"  # files that the ranks have read, and modules that they have imported

# A training by the classifier.
PREDICTIONS = "predictions.json"  # of the test images
FINAL_WEIGHTS = "checkpoints/final.pt"
FINAL_WEIGHTS_NOTES = "checkpoints/final.json"  # sha256, step, epoch, …
EVALUATION = "evaluation"
REPORT = "evaluation/report.json"
CONFUSION_MATRIX = "evaluation/confusion_matrix.png"
INITIAL_WEIGHTS = "init.pt"  # of a run that continues from other weights
INITIAL_WEIGHTS_NOTES = "init.json"  # their origin

# A script of one's own, which runs in a copy of the project.
OUTPUTS = "outputs"  # results besides checkpoints
OUTPUT_DIGESTS = "outputs.json"  # file → sha256
WORK = "work"  # working directories, one for each node: node0, node1, …
ABOVE = "above"  # in work/nodeN: the copy, and what the script wrote into folders above its copy
WORK_COPY = "above/above/code"  # in work/nodeN: the copy, so deep that ../x and ../../x stay in work/nodeN
GIVEN = "given.json"  # in work/nodeN: sizes and times of the files that were there before the script began
LOGGED = "logged.jsonl"  # in work/node0: rows of paceline.log; metrics.jsonl has all of them at a good end
EARLIER = "earlier.json"  # in work/node0: files of metrics before the attempt, with their sizes
PRINTED = "printed.jsonl"  # in work/node0: lines with metrics that earlier attempts printed
CARRIED = "carried"  # files that one host saved in an earlier attempt and gets back for this one
NODES = "nodes"  # results of hosts other than the first, by node rank

# Logs.
UNFINISHED = " (not finished yet)"  # ends a line that is the state of a progress bar under way

# Requests between the controller and rank 0.
PRUNE = "prune"  # the controller wants the run to end at the next epoch
PRUNED = "pruned.json"  # rank 0 has ended it
STOP = "stop"  # `doit stop` has ended the run: nothing is started again
ATTEMPT_IDS = "attempts.json"  # ids of all attempts, the newest last: a rank of an older one stops writing

# Results of diagnostics (`doit measure`, `doit profile`, …), in a run folder of their own.
HOST_SPEED = "host_speed.json"
PROFILE = "profile.json"
THROUGHPUT = "measure.json"

MANIFEST = "manifest.json"  # in the data pack: files, sizes, digests
