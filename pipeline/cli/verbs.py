"""The table of verbs (``VERBS``): what each `doit VERB` is for, its options and examples, and its function.

From it come the doit tasks (project.py), the parsing of the command line (invocation.py), `doit help` and docs/cli.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipeline.core.errors import UsageError, suggestion
from pipeline.core.tables import is_count

ON = ("1", "true", "yes")  # the values that switch an option on; upper case is accepted too


class Option(NamedTuple):
    """An option of a verb, typed as a flag (``--watch``, ``--metric NAME``) or as ``watch=1``, ``metric=NAME``."""

    # what its value looks like: "1" or "0" is a switch, which its flag sets to this value; "N" a whole number from 1;
    # "step|epoch" one of these words; any other text, such as "NAME", is a placeholder for help, and nothing is checked
    value: str
    meaning: str
    flag: str = ""  # the flag's name in help, if it isn't the option's name; both names are understood
    short: str = ""  # a flag of one letter
    stands_for: str = ""  # what it is translated to: an option of doit (-a), another verb (plan) or an override's name

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value: ``--watch``, ``--no-data``."""
        return self.value in ("1", "0")

    def flags(self, name: str) -> tuple[str, ...]:
        """Return all names of the flag of the option ``name``, without dashes; help shows the first one."""
        dashed_name = name.replace(".", "-").replace("_", "-")
        if self.value == "0":
            return (f"no-{dashed_name}",)
        return (self.flag, dashed_name) if self.flag else (dashed_name,)

    def typed(self, name: str) -> str:
        """Return the flag as it is typed: ``--watch``, ``--metric``, ``-n``."""
        flag = self.flags(name)[0]
        return f"-{flag}" if len(flag) == 1 else f"--{flag}"

    def spelt(self, name: str) -> str:
        """Return the flag as help shows it: ``--watch``, ``--metric NAME,…``, ``-n N``."""
        return self.typed(name) if self.is_switch else f"{self.typed(name)} {self.value}"

    def check(self, name: str, value: str) -> None:
        """Raise UsageError if ``value``, typed for the option ``name``, has control characters or a wrong form."""
        if not value.isprintable():
            raise UsageError(f"{name}={value!r} holds what can't be printed; is a shell variable wrong?")
        if self.is_switch and value.lower() not in (*ON, "0", "false", "no"):
            raise UsageError(f"{name}={value} must be 1 or 0")
        if self.value == "N" and not is_count(value):
            raise UsageError(f"{name}={value} must be a whole number from 1")
        if "|" in self.value and self.value.islower() and value not in self.value.split("|"):
            raise UsageError(f"{name}={value} is not known; {suggestion(value, self.value.split('|'))}")


RUN = Option(
    "KEY",
    "a run: its key, the beginning of it, or last, the one whose state changed last; default: the run of the overrides",
)
NEWEST = Option("KEY", "a run: its key, the beginning of it, or last; default without overrides: the newest")
FILE = Option("FILE", "the file to write", flag="output")
JSON = Option("1", "the same as JSON, for programs (docs/json.md)")


class Verb(NamedTuple):
    """One command."""

    summary: str  # one line for lists of commands
    examples: tuple[str, ...]  # without the leading `doit`
    details: str = ""  # further text of its help
    options: Mapping[str, Option] = MappingProxyType({})
    # what the verb uses overrides for: to describe the run to "train", to "set" any fields, to "name" a run, to say in
    # which "place" runs and records are, to "filter" existing runs; "": it takes no overrides
    overrides: str = "train"
    sweeps: bool = False  # overrides may have several values
    module: str = "train"  # the module of pipeline.cli.commands that has a function of the verb's name
    is_done: str = ""  # the function of pipeline.cli.finished that says whether it is up to date; "": it never is
    after: tuple[str, ...] = ()  # verbs whose tasks come first, unless run=KEY names an existing run
    answers: bool = False  # it only prints an answer; then doit's line about the task is left out
    arguments: str = ""  # its bare arguments in the usage line, if it takes any number of files, folders, keys or names
    outlives_closed_stdout: bool = False  # it continues when nobody reads its output any more (`| head`)

    @property
    def takes_all_overrides(self) -> bool:
        """Whether its help lists the groups of the configuration."""
        return self.overrides in ("train", "set")

    @property
    def shares_batch(self) -> bool:
        """Whether it refuses a global batch that the ranks can't share evenly."""
        return self.overrides in ("train", "name")

    def usage(self, name: str) -> str:
        """Return the usage line of the verb ``name``."""
        arguments = self.arguments or ("[KEY]" if "run" in self.options else "")
        parts = (arguments, "[OVERRIDE …]" * bool(self.overrides), "[--OPTION …]" * bool(self.options))
        return " ".join(["doit", name, *filter(None, parts)])


_SWEEP = Option("NAME", "the trials of a sweep; its name as a bare argument means the same")

_DETACH = Option("1", "start it and return: it goes on without this terminal; doit status, wait, logs and stop find it")
_BUDGET = Option("TIME", "end it in order after so long (90s, 30m, 1h30m), with a checkpoint; the same command goes on")

# fmt: off
_VERBS: Mapping[str, Verb] = {
    "fetch": Verb(is_done="is_fetched",
        summary="download, check and pack the data set",
        details="Data that is already packed is not downloaded again. Every file is checked against its digest.",
        examples=("fetch dataset=mnist", "fetch dataset=cifar10 dataset.source=/data/cifar-10-python.tar.gz")),
    "preflight": Verb(module="diagnostics", overrides="set", answers=True,
        summary="check every host of the cluster",
        details="Checks software, GPUs, cores, memory, disk, limits, clock and network of each host, as a training on "
        "several nodes does. A failed check gives exit code 1, a warning does not. docs/troubleshooting.md explains "
        "each check.",
        options={
            "deep": Option("1", "also the slow checks: all of nvidia-smi, clocks more exactly"),
            "measure": Option("1", "also time a matrix product on each rank and an all-reduce on each host and pair"),
        },
        examples=("preflight cluster=two_node", "preflight cluster=pssh cluster.hostfile=hosts.txt --deep")),
    "queue": Verb(module="hosts", overrides="place", answers=True,
        summary="who computes on the cluster's hosts, and which runs wait for them",
        details="Runs of all users are listed by their claims, processes on GPUs too. Of runs that wait "
        "(cluster.when_busy=wait) those of this project are known: docs/sharing-hosts.md.",
        examples=("queue cluster=two_node", "queue cluster=ours --json")),
    "plan": Verb(module="explain", answers=True,
        summary="what would run, why, and the exact command of each host",
        details="Contacts no host and writes nothing. With several values (seed=1,2) it lists the trials.",
        options={"format": Option("text|mermaid|dot", "text, or the steps as a graph")},
        examples=("plan experiment=quickstart", "plan experiment=quickstart seed='range(3)' --format mermaid")),
    "config": Verb(module="explain", overrides="set", answers=True,
        summary="the composed configuration and the source of each value",
        details="A source is a file of conf/, your own defaults (conf/local.yaml, ~/.config/paceline/defaults.yaml), "
        "the command line, or the default of a settings class (docs/configuration.md). The output is YAML.",
        examples=("config experiment=quickstart optimizer.lr=0.2",)),
    "why": Verb(module="explain", answers=True,
        summary="why a run is not up to date: how it differs from a finished one",
        details="Shows the fields that differ from the nearest finished run.",
        options={"run": RUN, "step": Option("NAME", "explain this step of yours instead of a run")},
        examples=("why experiment=quickstart optimizer.lr=0.2", "why cf0848", "why --step clean")),
    "accept": Verb(module="accept",
        summary="declare the difference from a finished run harmless",
        details="The run is then accepted, not proven. doit train then starts nothing, and every view of the run "
        "shows the mark. doit reproduce proves the run.",
        options={
            "run": Option("KEY", "the finished run: its key, the beginning of it, or last; default: the nearest one"),
            "undo": Option("1", "withdraw the acceptance"),
        },
        examples=("accept experiment=quickstart", "accept cf0848 experiment=quickstart",
            "accept experiment=quickstart --undo")),
    "step": Verb(module="steps", overrides="set", answers=True, arguments="[NAME …]",
        summary="run your own steps and what they need; without a name: their state",
        details="NAME is that of a step (conf/step/NAME.yaml). A step runs again only if its command or function, "
        "inputs, parameters or code change. Its outputs are in runs/steps. See docs/steps.md.",
        options={"n": Option("N", "so many independent steps at once", stands_for="-n")},
        examples=("step", "step clean", "step clean split -n 2", "step clean step.clean.args.rate=0.3")),
    "train": Verb(is_done="is_trained", after=("fetch",), outlives_closed_stdout=True,
        summary="train: fetch data, launch torchrun on every host, evaluate, record",
        details="A finished run is not repeated; --force repeats it and compares. The same command takes up what "
        "still trains of an interrupted run, or resumes it from its last checkpoint. With doit's option -v 0 only "
        "warnings, errors and the result are shown, with -v 2 also the output of torchrun (docs/watching.md).",
        options={
            "preflight.deep": Option("1", "first run all checks of doit preflight --deep"),
            "detach": _DETACH,
            "budget": _BUDGET,
            "dry_run": Option("1", "only show what would run, and why (doit plan)", stands_for="plan"),
            "force": Option("1", "repeat a finished run, and compare the two", stands_for="-a"),
            "prove": Option("1", "then kill a repetition of it, and compare what comes of it (doit prove)"),
        },
        examples=("train experiment=quickstart",
            "train model=resnet50 optimizer=adam optimizer.lr=1e-3 trainer.epochs=20 cluster=two_node")),
    "torchrun": Verb(overrides="name", outlives_closed_stdout=True,
        summary="train with a torchrun command line as it is: torchrun … train.py …",
        details="torchrun's options mean what they mean there, and what follows the script is the script's. "
        "Overrides, --cluster NAME and --sweep NAME=VALUES stand before the script. Without --nproc-per-node there is "
        "one rank, or as many as a named cluster has. A command may stand in front (plan torchrun …). `paceline run "
        "train.py …` starts one process without torchrun. Files and folders in arguments are part of the key: "
        "docs/own-scripts.md.",
        examples=("torchrun --nproc-per-node 2 train.py --lr 0.1",
            "torchrun --cluster two_node -m my_package.train --lr 0.1",
            "torchrun --nproc-per-node 2 --sweep lr=0.1,0.01 train.py --epochs 3")),
    "attach": Verb(outlives_closed_stdout=True,
        summary="take over a running training whose command was closed or killed",
        details="Its hosts continue for cluster.lease_s (600 s). attach shows their further output, fetches the "
        "results and records them; without words, of the only run under way. `doit train` with the same words does so "
        "too, and starts the run where nothing is left.",
        options={"run": RUN},
        examples=("attach experiment=quickstart cluster=two_node", "attach cf0848")),
    "sweep": Verb(module="sweep", sweeps=True, outlives_closed_stdout=True,
        summary="train every combination of values, or values that a search chooses",
        details="Values with commas, range(…) and choice(…), or a named grid (sweep=NAME); with search=NAME Optuna "
        "chooses. Each trial is an ordinary run; a finished one is not repeated.",
        options={
            "detach": _DETACH,
            "budget": _BUDGET,
            "max_trials": Option("N", "start at most N trials; the same command goes on with the others"),
            "dry_run": Option("1", "list the trials, which of them would run, and why; start nothing"),
            "n": Option("N", "so many trials at once on the same hosts (sweep.slots=N)", stands_for="sweep.slots"),
            "retry_failed": Option("1", "also retry trials that failed by an error in the code or a wrong value"),
            "fork": Option("1", "if a sweep of that name differs, start another one (NAME-2)"),
        },
        examples=("sweep experiment=quickstart optimizer.lr=0.1,0.01 seed='range(3)'",
            "sweep experiment=quickstart search=tpe 'optimizer.lr=tag(log,interval(1e-3,1))'")),
    "report": Verb(module="compare", overrides="filter", answers=True, arguments="[KEY|SWEEP …]",
        summary="results of a sweep or of runs, as a table and a self-contained page",
        details="Default: the newest sweep, grouped over seeds. KEY and overrides choose runs as in doit compare. The "
        "page is written to runs/reports.",
        options={
            "sweep": Option("NAME", "a sweep, as a bare argument too; default: the newest"),
            "format": Option("html|markdown|json", "the page, or the same as Markdown or JSON"),
            "file": FILE,
        },
        examples=("report", "report 5bb24236b1de --json", "report 495e1d", "report model=resnet18 --output nets.html")),
    "compare": Verb(module="compare", overrides="filter", answers=True, arguments="[KEY|SWEEP …]",
        summary="what differs between runs, compared with the spread over seeds",
        details="KEY is a run's key or its first digits; overrides filter as in doit runs, experiment=NAME too. Runs "
        "that differ only in their seed form one configuration; the first one is compared with the others. No claim "
        "is made about runs that are unfinished, unproven or accepted. See docs/comparing.md.",
        options={
            "sweep": _SWEEP,
            "metric": Option("NAME,…", "only these metrics"),
            "markdown": Option("1", "as tables in Markdown"),
        },
        examples=("compare 495e1d cf0848", "compare experiment=quickstart --markdown", "compare 5bb242")),
    "plot": Verb(module="compare", overrides="filter", answers=True, arguments="[KEY|SWEEP …]",
        summary="plot a metric with its spread over seeds",
        details="KEY and overrides choose runs as in doit compare. NaN and infinite values leave a gap.",
        options={
            "metric": Option("NAME", "default: val/accuracy, or the first metric of a script"),
            "x": Option("step|epoch|minutes", "default: step"),
            "log": Option("1", "a logarithmic axis of values"),
            "file": Option("FILE", "write a picture: .svg, .png or .pdf", flag="output"),
            "sweep": _SWEEP,
        },
        examples=("plot 495e1d cf0848 --metric train/loss --log", "plot experiment=quickstart --output curves.pdf")),
    "evaluate": Verb(module="records", after=("train",),
        summary="accuracy, per-class report and confusion matrix of a run",
        options={"run": RUN},
        examples=("evaluate cf0848", "evaluate experiment=quickstart")),
    "record": Verb(module="records", overrides="name",
        summary="replay a run into MLflow (exactly once)",
        options={"run": RUN},
        examples=("record cf0848", "record cf0848 tracking.uri=http://mlflow:5000")),
    "predict": Verb(module="records", overrides="place", answers=True, arguments="[KEY] IMAGE …",
        summary="classify image files with the network of a finished run",
        details="The network is exported from the run's own code, with its normalisation. Images are turned, cut and "
        "resized as doit fetch does it for dataset=folder. The first word is the run's key, or last.",
        options={
            "run": Option("KEY", "the run; default: the newest"),
            "top": Option("N", "how many classes of each image are shown (3)"),
        },
        examples=("predict cf0848 cat.jpg dog.jpg", "predict last photos/*.jpg --top 1 --json")),
    "ui": Verb(module="records", overrides="name", arguments="[KEY …]",
        summary="open MLflow to compare the runs",
        details="KEY … are keys of runs or their first digits: the page then opens with only these runs.",
        options={
            "port": Option("N", "the port to listen on; default: 5000, or a free one"),
            "charts": Option("METRIC,…", "only the charts of these metrics"),
        },
        examples=("ui", "ui cf0848 495e1d --charts val/accuracy",
            "ui --port 5001 tracking.uri=sqlite:////data/mlflow.db")),
    "mcp": Verb(module="mcp", overrides="", answers=True,
        summary="serve runs and trainings to an agent (MCP)",
        details="Needs the extra mcp. Its tools runs, show, compare, train and triage answer over stdin and stdout "
        "with the JSON of their verbs: docs/agents.md.",
        examples=("mcp",)),
    "runs": Verb(module="runs", overrides="filter", answers=True,
        summary="list the runs and the fields in which they differ",
        details="Overrides filter: model=resnet18 seed=1 lists the runs with these values. accuracy is that of the "
        "test images, time that of the training. What all have in common stands above; a failed run's line says why. "
        "Sizes are shown with --wide (of up to 200 runs), --sort size or --json.",
        options={
            "state": Option("STATE", "only runs in this state: FINISHED, FAILED, KILLED, …"),
            "sort": Option("time|accuracy|train_s|size|state|key", "the order; the newest or largest comes last"),
            "wide": Option("1", "all columns, and lines as long as they are"),
        },
        examples=("runs", "runs model=resnet18 --state FAILED", "runs dataset=digits --sort accuracy",
            "runs --sort size")),
    "clean": Verb(module="clean", overrides="filter", answers=True,
        summary="delete runs that are no longer needed, after a question",
        details="Shows the space that each frees, then asks. Default: failed runs, and runs superseded by a newer "
        "finished run of the same configuration. Each rule narrows the choice, and overrides filter as in doit runs. "
        "Never deleted: a run in progress, and a result that a sweep names, that was accepted for another key, or "
        "that MLflow doesn't have yet.",
        options={
            "state": Option("STATE", "runs in this state: FAILED, KILLED, PRUNED, FINISHED, …"),
            "superseded": Option("1", "runs with a newer finished run of the same configuration, data and ranks"),
            "older_than": Option("DAYS", "runs unchanged for so many days"),
            "checkpoints": Option("1", "only the checkpoints of finished runs; weights and results stay"),
            "hosts": Option("1", "instead of runs: what ended attempts have left on the cluster's hosts"),
            "steps": Option("1", "instead of runs: outputs of your steps that nothing needs any more"),
            "yes": Option("1", "don't ask", short="y"),
        },
        examples=("clean", "clean --state KILLED --older-than 30", "clean model=resnet18 --checkpoints",
            "clean --checkpoints", "clean --hosts cluster=two_node", "clean --steps")),
    "status": Verb(module="status", overrides="name", answers=True,
        summary="progress of a run, and the steps that are running",
        options={
            "run": NEWEST._replace(value="KEY|SWEEP"),
            "watch": Option("1", "follow it, or the running sweep, to its end; Ctrl-C does not stop it"),
        },
        examples=("status", "status cf0848", "status --watch")),
    "triage": Verb(module="triage", overrides="name", answers=True,
        summary="what failed of a run, where, the evidence and the next command",
        details="At most a thousand tokens, for people and for agents (--json). Without KEY: the newest run that did "
        "not finish, else the newest.",
        options={"run": NEWEST},
        examples=("triage", "triage cf0848 --json")),
    "wait": Verb(module="status", overrides="name", answers=True,
        summary="wait until a run or a sweep has ended; exit code 0: it finished",
        options={
            "run": NEWEST._replace(value="KEY|SWEEP"),
            "sweep": Option("NAME", "a sweep instead of a run, as a bare argument too"),
        },
        examples=("wait", "wait cf0848", "wait 5bb242 --json")),
    "logs": Verb(module="status", overrides="name", answers=True,
        summary="the output of the hosts of a run",
        options={
            "run": NEWEST,
            "host": Option("NAME", "only this host"),
            "step": Option("NAME", "the output of this step of yours instead of a run"),
            "follow": Option("1", "the newest lines, and further ones until the run has ended", short="f"),
        },
        examples=("logs", "logs cf0848 --host node1", "logs --follow", "logs --step clean")),
    "reproduce": Verb(module="reproduce", overrides="place",
        summary="repeat a finished run from its provenance and compare",
        details="Uses its commit and its uncommitted changes, in a separate checkout; compares weights, metrics and "
        "steps. Only cluster, paths, tracking and dataset.source of the configuration can be changed.",
        options={
            "run": Option("KEY|ID|FILE", "the run's key, the id of an MLflow run, or an archive of doit export"),
            "keep": Option("1", "keep the checkout"),
        },
        examples=("reproduce 495e1d", "reproduce 495e1d.tar.gz cluster=two_node")),
    "prove": Verb(module="reproduce", overrides="place", answers=True,
        summary="kill a repetition of a finished run, and compare what comes of it",
        details="Repeats the run as doit reproduce does, kills its ranks at moments drawn from a seed, gives the same "
        "command again, and compares outputs and metrics. Where they differ it names the culprit: no checkpoint, one "
        "that isn't read, optimizer or random state that isn't restored, another order of data, a time or path in "
        "the output. A run that nobody has repeated yet is repeated undisturbed first. See docs/proving.md.",
        options={
            "run": RUN,
            "kills": Option("N", "how often it is killed (3)"),
            "moments": Option("SEED", "the seed of the moments (0)"),
        },
        examples=("prove 495e1d", "prove last --kills 10 --moments 1")),
    "diff": Verb(module="reproduce", overrides="place", answers=True, arguments="KEY [KEY]",
        summary="where two trainings first differ: step, rank, module and operator",
        details="Compares the digests of two runs (trainer.digests=N), or of a run and its reproduction, then trains "
        "the steps around the first difference of both again, on this computer, and compares what each operator gave. "
        "Exit code 1: they differ. See docs/diff.md.",
        options={"replay": Option("0", "compare the digests alone")},
        examples=("diff 495e1d cf0848", "diff 495e1d")),
    "export": Verb(module="reproduce", overrides="place",
        summary="write a run as one archive",
        options={
            "run": RUN,
            "weights": Option("1", "include the final weights"),
            "to": Option("FILE", "the archive; default: runs/exports/KEY.tar.gz", flag="output"),
        },
        examples=("export 495e1d --weights --output /tmp/run.tar.gz",)),
    "stop": Verb(module="hosts", overrides="name",
        summary="stop a run on all of its hosts",
        options={"run": Option("KEY", "the run; default without overrides: the one in progress")},
        examples=("stop", "stop cf0848")),
    "benchmark": Verb(module="diagnostics", overrides="set", after=("fetch",),
        summary="measure throughput and scaling against a plain PyTorch loop",
        options={
            "pairs": Option("N", "alternating blocks of each loop (5)"),
            "block_s": Option("S", "seconds of a block (2)"),
        },
        examples=("benchmark model=resnet18", "benchmark cluster=two_node --pairs 7")),
    "profile": Verb(module="diagnostics", after=("fetch",),
        summary="trace a few training steps of rank 0 with torch's profiler",
        options={"steps": Option("N", "how many (5)")},
        examples=("profile experiment=quickstart --steps 3",)),
    "sync": Verb(module="hosts", overrides="place",
        summary="bring environment and data to all hosts before a run",
        details="With the overrides of a training it sends that training's data pack to hosts that lack it. With "
        "cluster.environment_from=lock it installs requirements-nodes.lock on hosts that lack it.",
        options={"data": Option("0", "without the data pack")},
        examples=("sync cluster=two_node experiment=quickstart",
            "sync cluster=two_node cluster.environment_from=lock --no-data")),
    "lab": Verb(module="hosts", overrides="",
        summary="simulated SSH hosts on this computer: --hosts 2 starts two",
        details="Needs Linux, root, openssh-server and iproute2. Without an option it shows the state of the lab.",
        options={"hosts": Option("N", "start a lab of so many hosts"), "down": Option("1", "remove it")},
        examples=("lab --hosts 2", "lab --down")),
}
# fmt: on

# what follows torchrun's script is the script's own; ui and mcp serve until they are stopped
_WITHOUT_JSON = ("torchrun", "ui", "mcp")
VERBS: Mapping[str, Verb] = {
    name: verb if name in _WITHOUT_JSON else verb._replace(options={**verb.options, "json": JSON})
    for name, verb in _VERBS.items()
}
