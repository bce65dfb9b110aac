"""The first code of the node agent on a host: makes the agent's other modules importable, and runs ``main``.

launchers/transport/payload.py sends this module, and then the others as one JSON object of texts. No file is written.
"""

import json
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType

PACKAGE = "paceline_agent"  # never ``pipeline``: a host may have an installed package of that name
CONTRACT = "trainers.contract"
RANKS = "trainers.ranks"
PACKAGES = (PACKAGE, PACKAGE + ".files", PACKAGE + ".host", PACKAGE + ".running", "trainers", CONTRACT)


class SourceFinder:
    """Finds and loads modules from their texts, for ``sys.meta_path``."""

    def __init__(self, texts: "dict[str, str]") -> None:
        self.texts = texts  # full name of a module → its source

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if fullname not in self.texts:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        exec(compile(self.texts[name], path_of(name), "exec"), module.__dict__)

    def get_source(self, fullname: str) -> str:  # linecache calls it, so tracebacks show source lines
        return self.texts[fullname]


def path_of(fullname: str) -> str:
    """Return the module's path in Paceline's repository, which tracebacks show."""
    folders = fullname.replace(PACKAGE, "pipeline.cluster.agent").replace(".", "/")
    return folders + ("/__init__.py" if fullname in PACKAGES else ".py")


def show(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
    """Print an uncaught error with source lines. Python before 3.13 itself would look for them in files only."""
    import traceback  # lazily, as every start of an agent loads this module

    traceback.print_exception(kind, error, trace)


def run(modules: bytes) -> None:
    """Answer the request that follows on stdin; never returns. ``modules``: JSON, full module name → text."""
    sys.meta_path.insert(0, SourceFinder(json.loads(modules)))
    sys.excepthook = show
    # shutil imports these two, which takes time, for archives that the agent doesn't use
    for name in ("bz2", "lzma"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    main = import_module(PACKAGE + ".main").main
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # an ordinary exit would wait for threads
