"""The verbs: what each is for, its own ``name=value`` words, and examples. `doit help VERB` shows all of it."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import Option, Verb
from pipeline.cli.verbs_comparing import COMPARING
from pipeline.cli.verbs_recording import RECORDING

_RUN = Option("KEY", "the run, by its key or the beginning of it; without it the overrides say which")
_JSON = Option("1", "the same as JSON, for scripts")
_SWEEP_FLAGS = {
    "dry_run": Option("1", "list the trials with done, to run and why; start nothing"),
    "retry_failed": Option("1", "also try again what failed by an error in the code or a wrong value"),
    "fork": Option("1", "where a sweep of that name differs, begin another one (NAME-2) beside it"),
}

VERBS: Mapping[str, Verb] = {
    "fetch": Verb(
        is_done="is_fetched",
        summary="get the data set, check it and pack it",
        details="Done already: nothing is downloaded. Every file is checked against its digest.",
        examples=("fetch dataset=mnist", "fetch dataset=cifar10 dataset.source=/data/cifar-10-python.tar.gz"),
    ),
    "preflight": Verb(
        module="pipeline.cli.diagnostics",
        answers=True,
        summary="ask every host of the cluster whether it can take part",
        details="Each host tells its software, GPUs, cores, memory, disk, limits, clock and network; a training of "
        "several nodes asks the same. A warning stops nothing; with a failure the exit code is 1. "
        "docs/troubleshooting.md explains each check.",
        options={
            "deep": Option("1", "also what takes its time: all of nvidia-smi, folders that are said to be shared"),
            "measure": Option("1", "also a matrix product on each rank and an all-reduce of each host and pair"),
            "baseline": Option("save", "measure, and keep the figures: later ones may be a fifth lower"),
            "json": _JSON,
        },
        examples=(
            "preflight cluster=two_node",
            "preflight cluster=pssh cluster.hostfile=hosts.txt deep=1",
        ),
        shares_batch=False,
    ),
    "plan": Verb(
        module="pipeline.cli.planning",
        answers=True,
        summary="what would be done, why, and the exact command of each host",
        details="Asks no host and writes nothing. With several values (seed=1,2) it lists the trials.",
        options={"json": _JSON, "format": Option("text|mermaid|dot", "text, or the steps as a graph")},
        examples=("plan experiment=quickstart", "plan experiment=quickstart seed='range(3)' format=mermaid"),
    ),
    "config": Verb(
        module="pipeline.cli.configuration",
        answers=True,
        summary="the composed configuration, each value with where it comes from",
        details="A file of conf/, the command line, or the default of a settings class (docs/configuration.md). "
        "What is printed is YAML.",
        examples=("config experiment=quickstart optimizer.lr=0.2",),
        shares_batch=False,
    ),
    "why": Verb(
        module="pipeline.cli.planning",
        answers=True,
        summary="why this run is not up to date: the fields that differ from the nearest finished one",
        options={"run": _RUN, "step": Option("NAME", "instead of a run, this step of yours"), "json": _JSON},
        examples=("why experiment=quickstart optimizer.lr=0.2", "why run=cf0848", "why step=clean"),
    ),
    "accept": Verb(
        module="pipeline.cli.acceptance",
        summary="say that what differs from a finished run is harmless: accepted, not proven",
        details="doit train then launches nothing, and all that shows the run says so. doit reproduce proves it.",
        options={
            "run": Option("KEY", "the finished run; without it the nearest one"),
            "undo": Option("1", "take it back"),
        },
        examples=("accept experiment=quickstart", "accept experiment=quickstart undo=1"),
    ),
    "step": Verb(
        module="pipeline.cli.steps",
        answers=True,
        takes_paths=True,
        summary="make steps of your own (conf/step/NAME.yaml) and what they need; without a name, how they stand",
        details="PATH is the name of a step. Nothing is made twice: a step has a key of its command or function, its "
        "inputs, parameters and code, and its outputs lie under that key in runs/steps. doit -n 4 step NAME … runs "
        "those side by side that don't need each other. docs/steps.md has all of it.",
        options={"json": _JSON},
        examples=("step", "step clean", "step clean step.clean.args.rate=0.3"),
        shares_batch=False,
    ),
    "dag": Verb(
        module="pipeline.cli.steps",
        answers=True,
        summary="the graph of steps, data set, training and report, with how each stands",
        details="With overrides it shows what their run is made of; without, all steps there are.",
        options={"format": Option("mermaid|dot", "for Mermaid, or for Graphviz")},
        examples=("dag", "dag dataset.source=step:clean format=dot"),
        shares_batch=False,
    ),
    "train": Verb(
        goes_on=True,
        is_done="is_trained",
        after=("fetch",),
        summary="train: fetch, launch torchrun on every host, evaluate, record",
        details="A finished run is not repeated; `doit -a train` makes it again and compares. "
        "A run that was interrupted goes on from its last checkpoint with the same command. With doit's option -v 0 "
        "only warnings, errors and the end are shown, with -v 2 also what torchrun says (docs/watching.md).",
        options={
            "threads_per_rank": Option("N,N,…", "threads of each rank, a number for each node; else by its cores"),
            "preflight.deep": Option("1", "first all that doit preflight deep=1 asks the hosts"),
        },
        examples=(
            "train experiment=quickstart",
            "train model=resnet50 optimizer=adam optimizer.lr=1e-3 trainer.epochs=20 cluster=two_node",
        ),
    ),
    "attach": Verb(
        goes_on=True,
        summary="take up a training whose command was closed or killed, where it is",
        details="Its hosts go on with it for cluster.lease_s (600 s); attach shows their lines from there on, brings "
        "the results and records them. `doit train` would end it and go on from its last checkpoint instead.",
        options={"run": _RUN},
        examples=("attach experiment=quickstart cluster=two_node", "attach run=cf0848"),
    ),
    "sweep": Verb(
        goes_on=True,
        module="pipeline.cli.sweeping",
        summary="train every combination of several values, or what a search chooses",
        details="Values with commas, range(…) and choice(…), or a named grid (sweep=NAME); "
        "with search=NAME Optuna chooses. Each trial is an ordinary run: what is finished is not run again.",
        options=_SWEEP_FLAGS,
        examples=(
            "sweep experiment=quickstart optimizer.lr=0.1,0.01 seed='range(3)'",
            "sweep experiment=quickstart search=tpe 'optimizer.lr=tag(log,interval(1e-3,1))'",
        ),
        sweeps=True,
    ),
    **COMPARING,
    "evaluate": Verb(
        after=("train",),
        summary="accuracy, per-class report and confusion matrix of a run",
        options={"run": _RUN},
        examples=("evaluate run=cf0848", "evaluate experiment=quickstart"),
    ),
    **RECORDING,
    "runs": Verb(
        module="pipeline.cli.listing",
        answers=True,
        summary="list the runs: state, hosts, time, size, accuracy, and the fields in which they differ",
        details="Overrides choose: model=resnet18 seed=1 lists the runs that have these values. The time is that of "
        "the training; of more than 200 runs the sizes are only told with sort=size or json=1.",
        options={
            "state": Option("STATE", "those in this state alone: FINISHED, FAILED, KILLED, …"),
            "sort": Option("time|accuracy|train_s|size|state|key", "the order; what is newest or most stands last"),
            "json": _JSON,
        },
        examples=("runs", "runs model=resnet18 state=FAILED", "runs dataset=digits sort=accuracy", "runs sort=size"),
        shows_groups=False,
        shares_batch=False,
        chooses=True,
    ),
    "clean": Verb(
        module="pipeline.cli.cleaning",
        answers=True,
        summary="remove runs that are no longer wanted: shows what each frees, asks first",
        details="Without a rule: what failed, and what a newer finished run of the same configuration supersedes. Each "
        "rule narrows, and overrides choose as in doit runs. Never removed: a run that is under way, and a result that "
        "a sweep names, that was accepted for another key, or that MLflow hasn't got yet.",
        options={
            "state": Option("STATE", "those in this state: FAILED, KILLED, PRUNED, FINISHED, …"),
            "superseded": Option("1", "those with a newer finished run of the same configuration, data and ranks"),
            "older_than": Option("DAYS", "those to which nothing has happened for so long"),
            "keep_best": Option("N", "finished ones but for the N best"),
            "by": Option("METRIC", "by which the best are found; without it val/accuracy"),
            "checkpoints": Option("1", "of finished runs what a training would go on from; weights and results stay"),
            "hosts": Option("1", "instead of runs: what attempts that are over have left on the cluster's hosts"),
            "steps": Option("1", "instead of runs: outputs of your own steps that no data pack or step was made of"),
            "yes": Option("1", "don't ask"),
        },
        examples=(
            "clean",
            "clean state=KILLED older_than=30",
            "clean model=resnet18 keep_best=5",
            "clean checkpoints=1",
            "clean hosts=1 cluster=two_node",
            "clean steps=1",
        ),
        shows_groups=False,
        shares_batch=False,
        chooses=True,
    ),
    "status": Verb(
        module="pipeline.cli.watching",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="how far a run has come, and which steps are being made",
        options={
            "run": Option("KEY", "the run (or its key alone); without it and without overrides the newest"),
            "watch": Option("1", "follow it, or the sweep under way, to its end; Ctrl-C leaves it alone"),
        },
        examples=("status", "status cf0848", "status watch=1"),
        shows_groups=False,
    ),
    "logs": Verb(
        module="pipeline.cli.watching",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="what the hosts of a run said",
        options={
            "run": Option("KEY", "the run (or its key alone); without it and without overrides the newest"),
            "host": Option("NAME", "this host alone"),
            "step": Option("NAME", "instead of a run, what this step of yours said"),
        },
        examples=("logs", "logs cf0848 host=node1", "logs step=clean"),
        shows_groups=False,
    ),
    "reproduce": Verb(
        module="pipeline.cli.reproducing",
        summary="make a finished run again from its provenance and compare",
        details="From its commit and its uncommitted changes, in a copy of its own; weights, metrics and steps are "
        "compared. Of the configuration only cluster, paths, tracking and dataset.source may be told anew.",
        options={
            "run": Option("KEY|ID|FILE", "the run's key, the id of an MLflow run, or an archive of doit export"),
            "keep": Option("1", "leave the copy of the code in place"),
        },
        examples=("reproduce run=495e1d", "reproduce run=495e1d.tar.gz cluster=two_node"),
        shares_batch=False,
        shows_groups=False,
    ),
    "export": Verb(
        module="pipeline.cli.reproducing",
        summary="a run as one archive",
        options={
            "run": _RUN,
            "weights": Option("1", "with the final weights"),
            "to": Option("FILE", "where to; without it runs/exports/KEY.tar.gz"),
        },
        examples=("export run=495e1d weights=1 to=/tmp/run.tar.gz",),
        shares_batch=False,
        shows_groups=False,
    ),
    "stop": Verb(
        summary="end a run on all of its hosts",
        options={"run": Option("KEY", "the run; without it and without overrides the one that is under way")},
        examples=("stop", "stop run=cf0848"),
        shows_groups=False,
    ),
    "allreduce": Verb(
        module="pipeline.cli.diagnostics",
        summary="all-reduce bandwidth of the cluster, every sum checked",
        options={
            "min_bytes": Option("SIZE", "the smallest message (8)"),
            "max_bytes": Option("SIZE", "the largest (64M over gloo, 1G over nccl)"),
            "iterations": Option("N", "measurements of each size (20)"),
        },
        examples=("allreduce cluster=two_node max_bytes=16M iterations=50",),
        shares_batch=False,
    ),
    "benchmark": Verb(
        module="pipeline.cli.diagnostics",
        after=("fetch",),
        summary="throughput and scaling against a plain PyTorch loop",
        options={
            "pairs": Option("N", "blocks of each loop, taken in turns (5)"),
            "block_s": Option("S", "seconds of a block (2)"),
            "against": Option("NAME,…", "other loops too: tuned, guide, lightning, accelerate"),
        },
        examples=("benchmark model=resnet18 against=guide,lightning", "benchmark cluster=two_node pairs=7"),
        shares_batch=False,
    ),
    "profile": Verb(
        module="pipeline.cli.diagnostics",
        after=("fetch",),
        summary="torch profiler trace of a few training steps of rank 0",
        options={"steps": Option("N", "how many (5)")},
        examples=("profile experiment=quickstart steps=3",),
    ),
    "ui": Verb(
        module="pipeline.cli.pages",
        takes_paths=True,
        bare="KEY",
        summary="compare the runs in MLflow's web page",
        details="KEY … are runs, by their keys or the beginnings of them: the page opens on these alone.",
        options={
            "port": Option("N", "the port to listen on; without it 5000, or a free one"),
            "charts": Option("METRIC,…", "the charts of these metrics alone"),
        },
        examples=("ui", "ui cf0848 495e1d charts=val/accuracy", "ui port=5001 tracking.uri=sqlite:////data/mlflow.db"),
        shows_groups=False,
    ),
    "server": Verb(
        module="pipeline.cli.pages",
        summary="a tracking server for a team, until Ctrl-C",
        details="What it listens on and where it keeps records are the fields tracking.server_*, best set in "
        "conf/tracking. Passwords come from the environment alone: PGPASSWORD or ~/.pgpass for PostgreSQL, "
        "MLFLOW_AUTH_ADMIN_PASSWORD for the first login. docs/tracking.md shows it whole.",
        examples=(
            "server",
            "server tracking.server_host=0.0.0.0 tracking.server_allowed_hosts=[node0]",
            "server tracking.server_store=postgresql://team@db/mlflow tracking.server_artifacts=/data/mlartifacts",
        ),
        shows_groups=False,
    ),
    "mesh": Verb(
        module="pipeline.cli.mesh",
        summary="ssh without a password among all hosts of the cluster, made from what you can reach already",
        details="Where a host has no ed25519 key one is made; public keys and host keys are brought to all hosts, each "
        "once; then every pair is tried. No password is asked for and host-key checking stays on.",
        options={
            "check": Option("1", "only try every pair; change nothing"),
            "undo": Option("1", "remove exactly what it added"),
        },
        examples=("mesh cluster=two_node", "mesh cluster=pssh cluster.hostfile=hosts.txt check=1"),
        shares_batch=False,
        shows_groups=False,
    ),
    "sync": Verb(
        module="pipeline.cli.syncing",
        takes_paths=True,
        summary="bring environment, data pack, files and folders to all hosts ahead of a run",
        details="With the words of a training it brings what that would send, and with cluster.environment_from=lock "
        "it makes the environment of requirements.lock on hosts that lack it; PATH … are files and folders of this "
        "computer (relative to the project), which rsync brings to cluster.workdir/folders/NAME. Then each host hashes "
        "what it has. Nothing is removed there unless asked.",
        options={
            "to": Option("FOLDER", "an absolute folder on the hosts, in place of cluster.workdir/folders"),
            "check": Option("1", "only tell what differs; change nothing"),
            "delete": Option("1", "remove there what a folder doesn't have here"),
            "data": Option("0", "without the data pack"),
        },
        examples=(
            "sync cluster=two_node experiment=quickstart",
            "sync cluster=two_node data=0 to=/data/shared notebooks ./lists/train.txt",
        ),
        shares_batch=False,
        shows_groups=False,
    ),
    "lab": Verb(
        summary="SSH hosts on this computer, for trying out: hosts=2 raises them, down=1 removes them",
        details="Linux as root, with openssh-server and iproute2. Without an option it says what is up.",
        options={"hosts": Option("N", "raise a lab of so many hosts"), "down": Option("1", "remove it")},
        examples=("lab hosts=2", "lab down=1"),
        composes=False,
    ),
}
