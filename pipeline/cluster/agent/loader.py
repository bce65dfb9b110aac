"""The first code of the agent on a host: imports its modules from the text that was sent, and runs ``main``.

launchers/transport/payload.py sends it.
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
    """Imports modules from texts, by full name; tracebacks show their lines, as linecache calls ``get_source``."""

    def __init__(self, texts: "dict[str, str]") -> None:
        self.texts = texts

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if fullname not in self.texts:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        exec(compile(self.texts[name], path_of(name), "exec"), module.__dict__)

    def get_source(self, fullname: str) -> str:
        return self.texts[fullname]


def path_of(fullname: str) -> str:
    folders = fullname.replace(PACKAGE, "pipeline.cluster.agent").replace(".", "/")
    return folders + ("/__init__.py" if fullname in PACKAGES else ".py")


def show(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
    """Print an uncaught error with source lines, which Python before 3.13 reads from files alone."""
    import traceback  # every start of an agent loads this module

    traceback.print_exception(kind, error, trace)


def run(modules: bytes) -> None:
    """Answer the request that follows on stdin; never returns. ``modules``: JSON, full module name → text."""
    sys.meta_path.insert(0, SourceFinder(json.loads(modules)))
    sys.excepthook = show
    for name in ("bz2", "lzma"):  # shutil would load their libraries, for archives that nothing here makes
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    main = import_module(PACKAGE + ".main").main
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # without waiting for threads
