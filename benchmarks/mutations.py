"""Changes of what a run is made of, and harmless ones: which of them change its key.

    python benchmarks/mutations.py [changes] [harmless] [seed]

In a clone of its own, with a module beside trainers/ that the model imports, `doit plan json=1` tells the key before
and after each change. Of those that change what is computed (code, configuration, data, versions, environment, hosts)
none may keep the key; a refusal counts as a changed key. Of the harmless ones (comments, formatting, additions, other
folder, user, locale, clone) none may change it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mutation_kinds as kinds
from measure import DOIT, ROOT, checked, surroundings
from mutation_kinds import Change, Setting

WORDS = ["experiment=quickstart", "tracking=none"]
DATA_WORDS = ["dataset=arrays", "model=small_cnn", "tracking=none"]


def main() -> int:
    words = [*sys.argv[1:], *["500", "200", "0"][len(sys.argv) - 1 :]]
    count, harmless, seed = map(int, words)
    print(f"{count} changes, {harmless} harmless ones, seed {seed}; {surroundings()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        place = Path(temporary)
        base = project(place)
        known = trained(base)
        wrong: list[str] = []
        told: Counter[tuple[bool, str, str]] = Counter()
        for change in drawn(place, base, known, count, harmless, random.Random(seed)):
            outcome = judge(change, place, base, known)
            told[change.weights, change.kind, outcome] += 1
            if outcome in ("KEPT", "CHANGED", "REFUSED"):
                wrong.append(f"{outcome}: {change.kind}: {change.name}")
                print(wrong[-1], flush=True)
    table(told)
    return 1 if wrong else 0


def project(place: Path) -> Setting:
    """A clone in which the model imports a module that lies beside trainers/."""
    root = place / "project"
    checked(["git", "clone", "--quiet", str(ROOT), str(root)], cwd=place)
    (root / "mylib").mkdir()
    (root / "mylib" / "__init__.py").write_text('"""A package of the person\'s own."""\n')
    (root / "mylib" / "scale.py").write_text("from mylib.deeper import BASE\n\nSCALE = BASE * 2.0\n")
    (root / "mylib" / "deeper.py").write_text("BASE = 0.5\n\n\ndef unused(x):\n    return x + 1 if x > 3 else None\n")
    model = root / "trainers" / "models" / "small_cnn.py"
    future = "from __future__ import annotations\n"
    model.write_text(model.read_text().replace(future, f"{future}\nfrom mylib.scale import SCALE as SCALE\n", 1))
    kinds.arrays(place / "images.npz")
    checked(["git", "add", "-A"], cwd=root)
    checked(["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "mylib"], cwd=root)
    where = [f"paths.runs={place}/runs", f"paths.data={place}/data"]
    return Setting(root, [*WORDS, *where], {"PYTHONPATH": str(root)})


def trained(base: Setting) -> dict[str, Any]:
    """What the run's key.json holds (it is trained in earnest: two steps), and the key of the whole run."""
    short = Setting(base.root, [*base.words, "trainer.max_steps=2"], base.env)
    done = typed(short, "train")
    if done.returncode != 0:
        sys.exit(f"the undisturbed run failed:\n{done.stdout}")
    folder = next(path.parent for path in Path(base.words[-2].partition("=")[2]).glob("*/key.json"))
    known: dict[str, Any] = json.loads((folder / "key.json").read_text())
    known["resolved"] = json.loads((folder / "config.json").read_text())
    known["name"] = key(base)
    missing = [name for name in ("mylib/scale.py", "mylib/deeper.py") if name not in known["code"]]
    if missing:
        sys.exit(f"MISSED: the key lacks {missing}")
    return known


def drawn(
    place: Path, base: Setting, known: dict[str, Any], count: int, harmless: int, chance: random.Random
) -> Iterable[Change]:
    """The changes of weights, then the harmless ones."""
    code = sorted(name for name in known["code"] if name.endswith(".py"))
    rest = [
        *kinds.config_changes(known["resolved"]),
        *kinds.data_changes(place / "images.npz", 60, chance),
        *kinds.version_changes(known["environment"], place / "overlays"),
        *kinds.topology_changes(),
    ]
    yield from rest
    yield from kinds.code_changes(base.root, code, max(0, count - len(rest)), chance)
    around = list(kinds.harmless_around(base.root, place))
    edits = list(kinds.harmless_in(base.root, code, chance))
    chance.shuffle(edits)
    yield from [*around, *edits[: max(0, harmless - len(around))]]


def judge(change: Change, place: Path, base: Setting, known: dict[str, Any]) -> str:
    """What became of the key; in capitals where it is wrong."""
    setting, before = base, known["name"]
    if change.kind == "data":
        shutil.copy2(place / "images.npz", place / "kept.npz")
        setting = Setting(base.root, [*DATA_WORDS, f"dataset.source={place}/images.npz", *base.words[2:]], base.env)
        before = fetched_key(setting)
        if before is None:
            sys.exit(f"the undisturbed data set was refused:\n{typed(setting, 'fetch').stdout}")
    try:
        after = (fetched_key if change.kind == "data" else key)(change.apply(setting))
    finally:
        restore(base.root, place)
    if change.weights:
        return "KEPT" if after == before else "refused" if after is None else "changed"
    return "kept" if after == before else "REFUSED" if after is None else "CHANGED"


def restore(root: Path, place: Path) -> None:
    checked(["git", "checkout", "-q", "--", "."], cwd=root)
    checked(["git", "clean", "-fdq"], cwd=root)
    if (place / "kept.npz").exists():
        os.replace(place / "kept.npz", place / "images.npz")  # noqa: PTH105


def fetched_key(setting: Setting) -> str | None:
    return key(setting) if typed(setting, "fetch").returncode == 0 else None


def key(setting: Setting) -> str | None:
    """The whole run's key; None where the command refuses."""
    done = typed(setting, "plan", "json=1")
    if done.returncode != 0:
        return None
    try:
        found: str | None = json.loads(done.stdout)["data"][0]["key"]
    except (ValueError, LookupError):
        sys.exit(f"doit plan printed no JSON:\n{done.stdout}{done.stderr}")
    return found


def typed(setting: Setting, *verb: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **setting.env}
    if str(setting.root) not in env["PYTHONPATH"]:
        env["PYTHONPATH"] = str(setting.root)
    argv = [*DOIT, *verb[:1], *setting.words, *verb[1:]]
    return subprocess.run(
        argv,
        cwd=setting.root,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def table(told: Counter[tuple[bool, str, str]]) -> None:
    print("\n| what | n | key changed | refused | key kept |\n| --- | --- | --- | --- | --- |")
    for weights in (True, False):
        names = dict.fromkeys(kind for is_weights, kind, _ in told if is_weights == weights)
        for kind in names:
            counts = {word.lower(): told[weights, kind, word] for word in ("changed", "refused", "kept")}
            counts = {word: n + told[weights, kind, word.upper()] for word, n in counts.items()}
            cells = " | ".join(str(counts[word] or "") for word in ("changed", "refused", "kept"))
            label = kind if weights else f"harmless: {kind}"
            print(f"| {label} | {sum(counts.values())} | {cells} |")
    total = sum(n for (weights, _, _), n in told.items() if weights)
    harmless = sum(told.values()) - total
    kept = sum(n for (_, _, word), n in told.items() if word == "KEPT")
    changed = sum(n for (_, _, word), n in told.items() if word in ("CHANGED", "REFUSED"))
    print(f"\n{kept} of {total} changes kept the key; {changed} of {harmless} harmless ones changed it or were refused")


if __name__ == "__main__":
    sys.exit(main())
