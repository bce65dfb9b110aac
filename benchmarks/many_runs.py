"""A thousand recorded runs: how long MLflow's chart page takes in a real browser, by the address that `doit ui` prints.

    python benchmarks/many_runs.py [runs] [times]

One run is trained and recorded, and its rows in the database are copied under names, keys and learning rates of their
own. A chart page counts as there when the titles of charts and the names of runs can be read and curves are drawn.
`runs_listing.py 1000` measures `doit runs`. Needs Debian's package chromium.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from measure import ROOT, spread, surroundings
from pages import DOIT, Page, browser, links, wait_for

TARGET_S = 10.0
TRAINED = ("experiment=quickstart", "trainer.epochs=3")
TITLES, NAME = ("test/accuracy", "train/loss"), "lr=0.0"
DRAWN = "document.querySelectorAll('.js-plotly-plot .scatterlayer .trace path.js-line').length"


def main() -> int:
    told = [int(word) for word in sys.argv[1:]]
    count, times = [*told, *(1000, 5)[len(told) :]]
    with tempfile.TemporaryDirectory(prefix="paceline-many-") as name:
        folder = Path(name)
        where = (f"paths.runs={folder}/runs", f"tracking.uri=sqlite:///{folder}/mlflow.db")
        subprocess.run([DOIT, "train", *TRAINED, *where], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        multiply(folder / "mlflow.db", count)
        with links(where) as addresses:
            taken = {page: [opened(folder / f"{page}{number}", addresses[page]) for number in range(times)]
                     for page in ("charts", "table")}  # fmt: skip
    print(f"MLflow's pages of {count:,} runs, each time in a fresh profile; {surroundings()}")
    for page, seconds in taken.items():
        print(f"{page}: {spread(seconds, 's')}; target {TARGET_S:g} s")
    return 0 if sorted(taken["charts"])[times // 2] <= TARGET_S else 1


def multiply(path: Path, count: int) -> None:
    """Copy the one run of a database with all that belongs to it until there are ``count``."""
    with sqlite3.connect(path) as database:
        ((one,),) = database.execute("select run_uuid from runs").fetchall()
        ids = [(number, uuid.uuid4().hex) for number in range(1, count)]
        for table in ("runs", "metrics", "latest_metrics", "params", "tags"):
            names = [row[1] for row in database.execute(f"pragma table_info({table})")]
            rest = ", ".join(name for name in names if name != "run_uuid")
            copy = f"insert into {table} (run_uuid, {rest}) select ?, {rest} from {table} where run_uuid = ?"
            database.executemany(copy, [(new, one) for _, new in ids])
        told = [(f"small_cnn lr={number / 1e6:f} · {new[:4]}", new) for number, new in ids]
        database.executemany("update runs set name = ?, start_time = start_time + rowid where run_uuid = ?", told)
        database.executemany("update tags set value = ? where key = 'mlflow.runName' and run_uuid = ?", told)
        rates = [(f"{number / 1e6:f}", new) for number, new in ids]
        database.executemany("update params set value = ? where key = 'optimizer.lr' and run_uuid = ?", rates)
        keys = [(new[:12], new) for _, new in ids]
        database.executemany("update tags set value = ? where key = 'paceline.run_key' and run_uuid = ?", keys)


def opened(profile: Path, address: str) -> float:
    """Seconds from the address typed into a fresh browser to a page that can be read."""
    with browser(profile) as page:
        began = time.monotonic()
        page.ask("Page.navigate", url=address)
        wait_for(lambda: is_there(page, "charts" in profile.name), lambda: page.text()[:3000])
        taken = time.monotonic() - began
    print(f"  {profile.name}: {taken:.1f} s", flush=True)
    return taken


def is_there(page: Page, has_charts: bool) -> bool:
    text = page.text()
    drawn = page.ask("Runtime.evaluate", expression=DRAWN)["result"].get("value", 0)
    return NAME in text and (not has_charts or (all(title in text for title in TITLES) and drawn > 0))


if __name__ == "__main__":
    sys.exit(main())
