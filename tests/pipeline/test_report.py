"""`doit report`: one page that needs no network, whatever stands in it; certificates and their check."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import reporting
from pipeline.comparing import charts, scales
from pipeline.comparing.charts import Node
from pipeline.comparing.reading import read
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import write_json
from pipeline.runs.naming import short_value
from pipeline.steps.lineage import PastStep
from tests.pipeline.comparing_folders import failed, swept, trained, write_curve
from tests.pipeline.conftest import Printed
from tests.waiting import HANG_S

HOSTILE = "<script>alert('x')</script>\"'&"
FETCHING = {
    "script",
    "link",
    "img",
    "iframe",
    "object",
    "embed",
    "source",
    "video",
    "audio",
    "base",
    "form",
    "image",
    "use",
}


@pytest.fixture
def reported(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What `doit report` says."""
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)  # no project's sources here
    return partial(printed, reporting.report)


@pytest.fixture
def verified(printed: Printed) -> Printed:
    """What `doit verify` says."""
    return partial(printed, reporting.verify)


class Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def a_sweep(runs_dir: Path) -> None:
    """Two learning rates with two seeds each, one of them failed, all names hostile."""
    folders = [
        trained(runs_dir, seed, lr, accuracy=0.9 - lr + seed / 100, metrics={f"m{HOSTILE}": 1.0}, note=f"{lr}{HOSTILE}")
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    folders.append(failed(runs_dir, why=f"training failed on {HOSTILE}: loss is nan"))
    swept(runs_dir, folders, ["experiment=quickstart", f"note={HOSTILE}"])


def test_the_page_of_a_sweep_fetches_nothing_and_runs_nothing(tmp_path: Path, reported: Printed) -> None:
    a_sweep(tmp_path)
    said = reported(tmp_path)
    assert "4 of 5 trials finished" in said  # the table, as ever
    assert f"  report       {tmp_path / 'reports' / 'sweep-tuned.html'}\n  certificate  " in said
    text = (tmp_path / "reports" / "sweep-tuned.html").read_text()
    page = Page(text)
    assert FETCHING.isdisjoint(tag for tag, _ in page.elements)
    assert {value[:1] for item in page.all("a") if (value := item["href"])} == {"#"}
    assert not [
        name for _, item in page.elements for name in item if name.startswith("on") or name in ("src", "action")
    ]
    assert re.findall(r"@import|url\(|https?://", text) == []
    assert "default-src 'none'" in str(page.all("meta")[1]["content"])


def test_the_page_tells_what_was_run_what_came_out_and_what_failed(tmp_path: Path, reported: Printed) -> None:
    a_sweep(tmp_path)
    reported(tmp_path)
    text = (tmp_path / "reports" / "sweep-tuned.html").read_text()
    page = Page(text)
    assert "4 of 5 runs finished, 3 configurations" in page.text
    assert f"A note={short_value(f'0.1{HOSTILE}')} optimizer.lr=0.1" in page.text  # the best first
    assert "0.8050 ± 0.0071" in page.text
    assert f"training failed on {HOSTILE}: loss is nan" in page.text
    assert "C nothing is claimed (C: none of its runs is finished)" in page.text
    assert "doit sweep experiment=quickstart" in page.text
    labels = [str(item["aria-label"]) for item in page.all("svg")]
    assert [label.partition(":")[0] for label in labels] == [
        "graph", "val/accuracy over step", "train/loss over step", "parallel coordinates of 5 trials",
    ]  # fmt: skip
    assert 'class="c0"><title>A ' in text
    assert 'class="band"' in text
    assert all(item.get("scope") in ("col", "row") for item in page.all("th"))
    scrolled = [item for item in page.all("div") if item.get("class") == "scroll"]
    assert scrolled
    assert all(item["tabindex"] == "0" and item["aria-label"] for item in scrolled)
    assert "prefers-color-scheme: dark" in text
    assert page.all("html") == [{"lang": "en"}]


def test_a_run_has_a_page_of_its_own_that_says_why_it_was_made(tmp_path: Path, reported: Printed) -> None:
    base, run = trained(tmp_path), trained(tmp_path, 1)
    verdict = {"reproduced": True, "compared": "weights_sha256"}
    write_json(tmp_path / ".reproduced" / run.key / "verdict.json", verdict)
    assert f"{run.key}.certificate.json" in reported(tmp_path, run.key[:6])
    text = Page((tmp_path / "reports" / f"{run.key}.html").read_text()).text
    assert f"the nearest other finished run is {base.key}; it differs in: seed: 0 → 1" in text
    assert "reproduced: weights_sha256, metrics and steps are equal" in text
    assert f"doit reproduce run={run.key}" in text
    assert "ab" * 32 in text


def test_values_that_are_no_number_are_gaps_that_are_said(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    write_curve(run, 0.9, {30: float("nan")})
    reported(tmp_path, run.key)
    text = (tmp_path / "reports" / f"{run.key}.html").read_text()
    assert "1 value(s) are no number: gaps" in text
    chart = text[text.index('aria-label="train/loss') :]
    assert chart[: chart.index("</svg>")].count("<polyline") == 2


def test_a_report_is_also_markdown_and_json_at_a_place_of_ones_own(tmp_path: Path, reported: Printed) -> None:
    a_sweep(tmp_path)
    markdown = reported(tmp_path, "sweep=tuned", "format=markdown")
    assert markdown.startswith("# Sweep tuned\n")
    assert "## What failed" in markdown
    assert "<script>" not in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).replace("&lt;script>", "")
    assert reported(tmp_path, "seed=0", "format=json", f"file={tmp_path}/r.json") == f"{tmp_path}/r.json\n"
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["curves"]["val/accuracy"]["A"][-1] == [50.0, 0.8, None, 1]
    assert json.loads(reported(tmp_path, "json=1"))["total"] == 5  # what scripts read of a sweep stays


def test_secrets_in_words_and_failures_are_hidden(tmp_path: Path, reported: Printed) -> None:
    run = failed(tmp_path, why="training failed: https://me:hunter22hunter@host/x")
    told = {"overrides": ["cluster.env.X=https://me:hunter22hunter@host"]}
    (run.path / "provenance.json").write_text(json.dumps(told))
    reported(tmp_path, run.key)
    assert "hunter22hunter" not in (tmp_path / "reports" / f"{run.key}.html").read_text()


def test_a_place_that_takes_no_file_is_named(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    with pytest.raises(PacelineError, match=r"/x\.html: there is no folder .*/key\.json"):
        reported(tmp_path, run.key, f"file={run.path}/key.json/x.html")


def test_a_pipe_or_a_link_is_not_replaced_and_no_folder_is_made(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "link.html").symlink_to("pipe.html")
    (tmp_path / f"{run.key}.certificate.json").symlink_to("elsewhere")
    for name, kind in {"pipe": "a pipe", "link": "a symbolic link"}.items():
        with pytest.raises(UsageError, match=rf"file=.*{name}\.html is {kind}, and only a regular file is replaced"):
            reported(tmp_path, run.key, f"file={tmp_path}/{name}.html")
    with pytest.raises(UsageError, match=r"the certificate: .* is a symbolic link"):
        reported(tmp_path, run.key, f"file={tmp_path}/a.html")
    with pytest.raises(UsageError, match=r"there is no folder .*/nonexistent\n  try: mkdir -p "):
        reported(tmp_path, run.key, f"file={tmp_path}/nonexistent/a.html")
    assert (tmp_path / "pipe.html").is_fifo()
    assert (tmp_path / "link.html").is_symlink()
    assert not (tmp_path / "nonexistent").exists()


# --------------------------------------------------------------------------------------- in a browser
@pytest.mark.slow
def test_chromium_shows_the_page_at_every_width_and_asks_nobody(tmp_path: Path, reported: Printed) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here")
    a_sweep(tmp_path)
    reported(tmp_path)
    widths = (320, 768, 1200)
    frames = "".join(
        f'<iframe src="reports/sweep-tuned.html" width="{width}" height="600"></iframe>' for width in widths
    )
    script = (
        "onload = () => { document.title = [...document.querySelectorAll('iframe')].map(frame => { const page = "
        "frame.contentDocument; return [page.documentElement.scrollWidth <= frame.clientWidth, "
        "page.querySelectorAll('svg').length, page.scripts.length].join() }).join(' ') }"
    )
    (tmp_path / "all.html").write_text(
        f"<!DOCTYPE html><title></title><img src='http://probe.invalid/'>{frames}<script>{script}</script>"
    )
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=_take_down, args=(proxy, asked), daemon=True).start()
        done = subprocess.run(
            [
                chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
                "--disable-default-apps", f"--proxy-server=127.0.0.1:{proxy.getsockname()[1]}",
                f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/all.html",
            ],
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
    assert "<title>true,4,0 true,4,0 true,4,0</title>" in done.stdout, done.stdout[:300] + done.stderr[-2000:]
    others = [line for line in asked if b"google" not in line]  # Chromium asks its maker for the time
    assert [line.split()[1] for line in others] == [b"http://probe.invalid/"], "the frame around the page alone asks"


def _take_down(proxy: socket.socket, asked: list[bytes]) -> None:
    """What a browser asks for, which it doesn't get."""
    while True:
        try:
            connection, _ = proxy.accept()
        except OSError:
            return
        with connection:
            asked.append(connection.recv(200).splitlines()[0])


# ------------------------------------------------------------------------------------------ certificates
@pytest.fixture
def certified(tmp_path: Path, reported: Printed) -> Path:
    """The certificate of a run in ``tmp_path``, whose files are intact."""
    run = trained(tmp_path)
    raw = json.loads((run.path / "key.json").read_text())
    assert raw["key"] == run.key
    reported(tmp_path, run.key)
    return tmp_path / "reports" / f"{run.key}.certificate.json"


def test_a_certificate_is_checked_with_its_run_and_without(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)  # no project's sources here
    said = verified(tmp_path, str(certified))
    checked = "key, code, 9 files, figures (not the data, which isn't here)"
    assert f"whole, and run {certified.name[:12]} is what it says: {checked}" in said
    assert "not who wrote it" in said
    elsewhere = verified(tmp_path / "nowhere", str(certified))
    assert f"Run {certified.name[:12]} isn't here, so nothing else was checked" in elsewhere


def test_a_certificate_names_the_file_of_the_run_that_was_altered(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    (tmp_path / certified.name[:12] / "checkpoints" / "final.pt").write_text("some byteS")
    (tmp_path / certified.name[:12] / "config.yaml").unlink()
    with pytest.raises(PacelineError, match=r"isn't what it says:\n  checkpoints/final.pt: its sha256 isn't \w{12}…\n"):
        verified(tmp_path, str(certified))


def test_nothing_is_certified_that_its_check_would_refuse(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    (run.path / "checkpoints" / "final.pt").write_text("some byteS")
    with pytest.raises(
        PacelineError, match=rf"{run.key} isn't .*: checkpoints/final\.pt was altered\n  try: the same doit"
    ):
        reported(tmp_path, run.key)
    assert not (tmp_path / "reports").exists()


def test_a_run_whose_curves_were_edited_is_reported_as_altered(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    (run.path / "metrics.jsonl").write_text("")
    assert reported(tmp_path, run.key).startswith("\nALTERED\n")
    assert not list((tmp_path / "reports").glob("*.certificate.json"))


@pytest.fixture
def of_sweep(tmp_path: Path, reported: Printed, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificate of a sweep: two runs that are finished, and one that failed."""
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    swept(tmp_path, [trained(tmp_path, 0), trained(tmp_path, 1), failed(tmp_path)], ["seed=range(2)"])
    assert "certificate  " in reported(tmp_path)
    return tmp_path / "reports" / "sweep-tuned.certificate.json"


def test_a_sweeps_certificate_holds_each_finished_run_and_names_the_others(
    tmp_path: Path, of_sweep: Path, verified: Printed
) -> None:
    assert [*documents.read_sealed(of_sweep)["others"].values()] == ["FAILED"]
    said = verified(tmp_path, str(of_sweep))
    assert "whole, and 2 of its 2 runs are what it says: key, code, 18 files, figures (not the data" in said
    assert "made again   2 not made again when this was written" in said
    assert re.search(r"not checked  what it says of those that weren't finished: \w{12} FAILED", said)
    shutil.rmtree(tmp_path / documents.read_sealed(of_sweep)["runs"][1]["run"])
    assert "1 run: only that their keys follow" in verified(tmp_path, str(of_sweep))
    none_here = verified(tmp_path / "nowhere", str(of_sweep))
    assert "the keys of its 2 runs follow from their parts. None of them is here" in none_here


def test_a_sweeps_certificate_names_the_run_that_was_altered_and_the_one_that_was_edited(
    tmp_path: Path, of_sweep: Path, verified: Printed
) -> None:
    raw = documents.read_sealed(of_sweep)
    altered = raw["runs"][1]["run"]
    (tmp_path / altered / "checkpoints" / "final.pt").write_text("some byteS")
    with pytest.raises(PacelineError, match=f"not all of its runs are what it says:\n  {altered}: checkpoints/final"):
        verified(tmp_path, str(of_sweep))
    edits = [{"runs": runs} for runs in ([raw["runs"][0], {**raw["runs"][1], "what": 7}], [7], [], raw["runs"] * 2)]
    edits += [{"others": others} for others in (["x"], {altered: "FAILED"}, {"0" * 12: "FINISHED"}, {"\x1b": "FAILED"})]
    for edit in edits:
        of_sweep.write_text(documents.sealed({**raw, **edit}))
        with pytest.raises(PacelineError, match="was edited and sealed anew"):
            verified(tmp_path, str(of_sweep))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("weights_sha256", "0" * 64, "weights_sha256: the run has "),
        ("finished_unix_time", 1, "finished_unix_time: the run has "),
        ("metrics", {"test/accuracy": 1.0}, "metrics: the run has "),
        ("origin_sha256", {}, "origin_sha256: the run has "),
        ("files_sha256", {}, "checkpoints/final.pt: the certificate doesn't name it"),
    ],
)
def test_a_certificate_that_was_sealed_anew_is_held_against_all_that_the_run_tells(
    tmp_path: Path,
    certified: Path,
    verified: Printed,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    said: str,
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    certified.write_text(documents.sealed({**documents.read_sealed(certified), name: value}))
    with pytest.raises(PacelineError, match=said):
        verified(tmp_path, str(certified))


def test_a_certificate_leads_to_no_file_elsewhere(tmp_path: Path, certified: Path, verified: Printed) -> None:
    raw = documents.read_sealed(certified)
    for name in ("/etc/passwd", "../../../../etc/passwd"):
        certified.write_text(documents.sealed({**raw, "files_sha256": {**raw["files_sha256"], name: "0" * 64}}))
        with pytest.raises(PacelineError, match=f"{name}: leads out of the run's folder"):
            verified(tmp_path, str(certified))


@pytest.mark.parametrize("name", ["result.json", "code", "key.json"])
def test_what_a_run_no_longer_has_is_not_called_checked(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    gone = tmp_path / certified.name[:12] / name
    gone.rename(tmp_path / "elsewhere")
    with pytest.raises(PacelineError, match=f"isn't what it says:\n(.*\n)*  {name}"):
        verified(tmp_path, str(certified))


def test_a_verdict_of_which_nothing_is_here_is_said_to_be_unchecked(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    certified.write_text(documents.sealed({**documents.read_sealed(certified), "verdict": "reproduced"}))
    assert "that it was made again, of which nothing is here" in verified(tmp_path, str(certified))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files_sha256", None),
        ("files_sha256", ["a"]),
        ("files_sha256", {"key.json": 7}),
        ("files_sha256", {"a\0b": "0" * 64}),
        ("verdict", "reproduced\n\x1b[31mwhole"),
        ("what", "digits\nwhole"),
    ],
)
def test_a_field_that_nobody_writes_is_named(
    tmp_path: Path, certified: Path, verified: Printed, name: str, value: Any
) -> None:
    certified.write_text(documents.sealed({**documents.read_sealed(certified), name: value}))
    with pytest.raises(PacelineError, match=f"was edited and sealed anew: {name} is ") as caught:
        verified(tmp_path, str(certified))
    assert "\x1b" not in str(caught.value)


def edited(raw: dict[str, Any]) -> bytes:
    raw["made_of"]["config"]["seed"] = 7
    return documents.sealed(raw).encode()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda raw, data: data.replace(b'"seed": 0', b'"seed": 7'), PacelineError, "was edited or damaged"),
        (lambda raw, data: data[: len(data) // 2], PacelineError, "was edited or damaged"),
        (lambda raw, data: edited(raw), PacelineError, "was edited and sealed anew: its parts don't give key"),
        (
            lambda raw, data: documents.sealed({**raw, "version": 9}).encode(),
            UsageError,
            "has version 9; this Paceline",
        ),
        (lambda raw, data: documents.sealed({"kind": "x"}).encode(), UsageError, "is no certificate of a run"),
        (lambda raw, data: data.replace(b"\n", b"\r\n"), PacelineError, "its line ends or spacing were changed"),
        (lambda raw, data: b"\x00\x01", UsageError, "is no certificate of a run"),
        (lambda raw, data: b"", UsageError, "is no certificate of a run"),
    ],
)
def test_a_damaged_an_edited_and_a_foreign_file_are_told_apart(
    tmp_path: Path, certified: Path, verified: Printed, make: Any, error: type[PacelineError], said: str
) -> None:
    raw = documents.read_sealed(certified)
    certified.write_bytes(make(raw, certified.read_bytes()))
    with pytest.raises(PacelineError, match=said) as caught:
        verified(tmp_path, str(certified))
    assert type(caught.value) is error


def test_a_file_that_is_not_there_is_said(tmp_path: Path, verified: Printed) -> None:
    trained(tmp_path)
    with pytest.raises(UsageError, match=r"x\.json can't be read: No such file"):
        verified(tmp_path, str(tmp_path / "x.json"))
    with pytest.raises(UsageError, match="which file"):
        verified(tmp_path)


# ------------------------------------------------------------------------------------------------ charts
@pytest.mark.parametrize(
    ("low", "high", "is_log", "ticks"),
    [
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.0, 978.0, False, [200, 400, 600, 800]),
        (0.002, 50.0, True, [0.01, 0.1, 1, 10]),
    ],
)
def test_ticks_are_round(low: float, high: float, is_log: bool, ticks: list[float]) -> None:
    assert scales.Scale(low=low, high=high, is_log=is_log).ticks() == pytest.approx(ticks)


def test_letters_can_be_read_on_every_colour_in_the_light_and_in_the_dark() -> None:
    """At least 4.5 : 1, as WCAG 2 asks of text: a configuration's letter stands on its colour in that of the page."""
    style = Path(charts.__file__).with_name("report.html.jinja").read_text().partition("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for told in (light, dark):
        colours = dict(re.findall(r"--(\w+): #([0-9a-f]{3,6});", told))
        for name in ("soft", "bad", "good", "link", *(f"c{at}" for at in range(charts.COLOURS))):
            assert contrast(colours[name], colours["ground"]) >= 4.5, (name, colours[name])


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        pairs = [char * 2 for char in colour] if len(colour) == 3 else re.findall("..", colour)
        parts = [int(pair, 16) / 255 for pair in pairs]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_graph_has_each_box_after_what_it_needs() -> None:
    nodes = [Node(name="a", lines=("a<b>",)), Node(name="b", lines=("b",), needs=("a",))]
    svg = charts.graph(nodes)
    assert "a&lt;b&gt;" in svg
    places = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', svg)]
    assert places == [1, 181]


def test_the_steps_that_the_data_came_of_stand_before_it(tmp_path: Path, reported: Printed) -> None:
    for name, files, data in (
        ("split-0123456789ab", {"part.csv": "1" * 64}, {"raw/all.csv": "0" * 64}),
        ("clean-aaaaaaaaaaaa", {"images.npz": "8" * 64}, {"step:split/part.csv": "7" * 64}),
        ("clean-ba9876543210", {"images.npz": "2" * 64}, {"step:split/part.csv": "1" * 64}),
    ):
        record = {"name": name.partition("-")[0], "files": files, "parts": {"data": data}}
        write_json(tmp_path / "steps" / name / "step.json", record)
    run = trained(tmp_path)
    config = json.loads((run.path / "config.json").read_text())
    config["dataset"] = {"name": "arrays", "source": "step:clean"}
    (run.path / "config.json").write_text(json.dumps(config))
    origin = tmp_path / "steps" / "clean-ba9876543210" / "out" / "images.npz"
    write_json(run.path / "data" / "stamps.json", {"origin": str(origin)})
    made = read(run).made_with
    assert made == PastStep(name="clean", key="ba9876543210", needs=(PastStep(name="split", key="0123456789ab"),))
    reported(tmp_path, run.key)
    page = (tmp_path / "reports" / f"{run.key}.html").read_text()
    assert "graph: step split 0123456789ab, step clean ba9876543210, digits dddddddddddd" in page
    (run.path / "data" / "stamps.json").unlink()
    assert read(run).made_with == PastStep(name="clean")


def test_a_run_is_read_with_its_words_and_hosts(tmp_path: Path) -> None:
    run = read(trained(tmp_path))
    assert run.command == "doit train experiment=quickstart optimizer.lr=0.1 seed=0"
    assert (run.hosts, run.seed, run.counts) == (("a",), 0, True)
