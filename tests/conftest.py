"""What all tests share: fixtures of several folders, and signals as a person at a terminal has them."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_FIXTURES = ("shared", "lab", "slurm", "kubernetes", "s3", "container")
pytest_plugins = [f"tests.{name}_fixture" for name in _FIXTURES]

# a background job ignores Ctrl-C, what nohup starts ignores SIGHUP, and so would every command that a test starts
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# threads of one process wait for each other without pause: slow where other tests want the same cores. torch reads it
os.environ.setdefault("OMP_NUM_THREADS", "1")

# what whoever runs the tests has set for their own runs
os.environ["PACELINE_DEFAULTS"] = ""

# the tests start more than a thousand commands, each of which would compile the project's modules anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests and their processes leave where the system has temporary files goes when pytest's own folders do."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


_RUNS_AND_HOSTS = ("integration", "contract")
_ALL_SLOW = "\npytestmark = pytest.mark.slow\n"
_STARTS_RANKS = ("tests.trainers.ranks", "tests.trainers.tiny_runs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import a module whose tests are all slow where slow ones are left out."""
    if "not slow" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    is_slow = collection_path.parent.name in _RUNS_AND_HOSTS or _ALL_SLOW in collection_path.read_text(encoding="utf-8")
    return True if is_slow else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end, so Python looks for garbage among what tests make alone."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """What starts runs, hosts or ranks is slow by its folder or by what it imports; other tests carry the marker."""
    for item in items:
        module = getattr(item, "module", None)
        imported = {getattr(value, "__module__", None) for value in vars(module).values()} if module else set()
        if item.path.parent.name in _RUNS_AND_HOSTS or not imported.isdisjoint(_STARTS_RANKS):
            item.add_marker(pytest.mark.slow)
    yield  # those that -m leaves out go
    _only_last_skipped(config, items)
    items[:] = spread(items)


_SKIPPED = "paceline/skipped"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--last-skipped``: what a bare machine skipped runs once its packages are installed."""
    parser.addoption("--last-skipped", action="store_true", help="run only the tests that the last run skipped")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Keep the names of the skipped tests, as pytest keeps those of the failed ones for ``--last-failed``."""
    if config.cache is not None and not (config.getoption("--last-skipped") or config.getoption("--last-failed")):
        config.cache.set(_SKIPPED, [report.nodeid for report in terminalreporter.stats.get("skipped", ())])


def _only_last_skipped(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.cache is None or not config.getoption("--last-skipped"):
        return
    # a module that is skipped whole has no test to name
    names = config.cache.get(_SKIPPED, [])
    chosen = [item for item in items if item.nodeid in names or item.nodeid.partition("::")[0] in names]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _place(module: Sequence[pytest.Item]) -> tuple[bool, int]:
    slow = sum("slow" in item.keywords for item in module)
    return slow == 0, slow


def spread(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Modules with slow tests first in each worker's share, which xdist cuts in this order: none ends with them.

    Of these the ones with few tests first: they hold a whole sweep, search or page of the docs each.
    """
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
    for module in sorted(modules.values(), key=_place):
        min(shares, key=len).extend(module)
    return [item for share in shares for item in share]


def pytest_collection_finish() -> None:
    """Importing Paceline's command line lets Ctrl-C end a process at once; pytest has fixtures to tidy up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
