"""How much of the code one training touches: modules loaded by the controller, and files on the way to torchrun.

    python benchmarks/launch_path.py experiment=quickstart cluster=two_node trainer.max_steps=2

Needs `doit lab hosts=2` before. Runs `doit train` with these overrides in this process, in a run folder of its own. The
controller's way to torchrun is the main thread's stack when the first program of a start is started; the node's part is
NODE, the files that a start passes there.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

from measure import ROOT

sys.path.insert(0, str(ROOT))
MOST_LOADED, MOST_FILES, MOST_RETURNS = 150, 35, 8
NODE = (  # the order in which a start passes them
    *("pipeline/cluster/agent/loader.py", "pipeline/cluster/agent/main.py"),
    *("pipeline/cluster/agent/running/supervisor.py", "pipeline/cluster/agent/running/warm.py"),
    *("trainers/ranks.py", "trainers/torchrun.py"),
)
OWN = ("pipeline", "trainers", "paceline", "hydra_plugins", "dodo")


def main() -> int:
    path = controllers_path(["train", *sys.argv[1:]])
    missing = [name for name in NODE if not (ROOT / name).is_file()]
    if not path or missing:
        print(f"no start was seen (is the run finished already?); files that have moved: {missing}")
        return 1
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in OWN)
    packages = sum(hasattr(sys.modules[name], "__path__") for name in loaded)
    files = [*path, *NODE]
    entered = [name for name, before in zip(files, ["", *files], strict=False) if name != before]
    returns = len(entered) - len(set(entered))
    print(f"own modules loaded by the controller: {len(loaded)}, of them {packages} packages (target {MOST_LOADED})")
    print(f"files from the command to torchrun: {len(set(entered))} (target {MOST_FILES})")
    print(f"returns to a file that was left: {returns} (target {MOST_RETURNS})")
    print(*(f"  {name}" for name in entered), sep="\n")
    kept = len(loaded) <= MOST_LOADED and len(set(entered)) <= MOST_FILES and returns <= MOST_RETURNS
    return 0 if kept else 1


def controllers_path(words: list[str]) -> list[str]:
    """The own files on the main thread's stack, outermost first, when the ranks' start was sent to the hosts."""
    seen: list[str] = []
    main_thread = threading.main_thread().ident or 0

    def note(event: str, _: object) -> None:
        if event == "subprocess.Popen":
            here = stack(sys._current_frames()[main_thread])
            if any("/launchers/" in name for name in here) and "pipeline/cluster/attempt/running.py" in here:
                seen[:] = seen or here

    sys.addaudithook(note)
    from doit.doit_cmd import DoitMain

    with tempfile.TemporaryDirectory() as place:
        DoitMain().run([*words, f"paths.runs={place}/runs", "tracking=none"])
    return seen


def stack(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__):
            names.append(path.relative_to(ROOT).as_posix())
        frame = frame.f_back
    return names[::-1]


if __name__ == "__main__":
    sys.exit(main())
