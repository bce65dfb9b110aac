"""`doit report`: one page that needs no network, whatever stands in it."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from pipeline.comparing import comparison as tables
from pipeline.comparing import report
from pipeline.comparing.comparison import compare
from pipeline.comparing.groups import grouped, read
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import write_json
from pipeline.runs.contents import short_value
from pipeline.steps.step_folders import PastStep
from tests.pipeline.comparing_folders import HOSTILE, a_sweep, failed, swept, trained, write_curve
from tests.pipeline.conftest import Printed

pytestmark = pytest.mark.slow

FETCHING = {"script", "link", "iframe", "object", "embed", "source", "video", "audio", "base", "form", "image", "use"}


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


@pytest.mark.ci
@pytest.mark.long
def test_the_page_of_a_sweep_fetches_nothing_and_runs_nothing(tmp_path: Path, reported: Printed) -> None:
    a_sweep(tmp_path)
    said = reported(tmp_path)
    assert "4 of 5 trials finished" in said  # the table, as ever
    assert f"  report       {tmp_path / 'reports' / 'sweep-tuned.html'}" in said
    text = (tmp_path / "reports" / "sweep-tuned.html").read_text()
    page = Page(text)
    assert FETCHING.isdisjoint(tag for tag, _ in page.elements)
    assert {value[:1] for item in page.all("a") if (value := item["href"])} == {"#"}
    assert not [name for _, item in page.elements for name in item if name.startswith("on") or name == "action"]
    assert all(str(item["src"]).startswith("data:image/png;base64,") for _, item in page.elements if "src" in item)
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
        "differences from the best in test/accuracy, images_per_s, train_s",
        "val/accuracy over step", "train/loss over step",
    ]  # fmt: skip
    assert labels[1].startswith("val/accuracy over step: 2 curves; A ends at 0.805, B ends at 0.705")
    assert re.search(r'<title>A [^<]* \(n=2\)</title><path d="[^"]*" style="fill: none; stroke: var\(--c0\)', text)
    assert "opacity: 0.2" in text  # its spread
    assert all(item.get("scope") in ("col", "row") for item in page.all("th"))
    scrolled = [item for item in page.all("div") if item.get("class") == "scroll"]
    assert scrolled
    assert all(item["tabindex"] == "0" and item["aria-label"] for item in scrolled)
    assert "prefers-color-scheme: dark" in text
    assert page.all("html") == [{"lang": "en"}]


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ({0.1: (0.93, 0.94), 0.2: (0.92, 0.94), 0.3: (0.10, 0.11)},
         "Best is A (lr 0.1): test/accuracy 0.9350 ± 0.0071 (n 2). "
         "B is not distinguishable from it; C is worse by more than the spread over seeds."),
        ({0.1: (0.9, 0.9), 0.2: (0.9, 0.9)}, "Best is A (lr 0.1): test/accuracy 0.9000 ± 0 (n 2). "
         "Nothing is claimed about B: no spread: all seeds came out the same."),
        ({0.1: (0.9,), 0.2: (0.8,)},
         "Best is A (lr 0.1): test/accuracy 0.9000 (n 1). Nothing is claimed about B: no spread known (n = 1)."),
        ({0.1: (0.9,)}, "test/accuracy 0.9000."),
    ],
)  # fmt: skip
def test_a_page_begins_with_what_can_be_concluded(
    tmp_path: Path, reported: Printed, accuracies: dict[float, tuple[float, ...]], said: str
) -> None:
    for lr, of_seeds in accuracies.items():
        for seed, accuracy in enumerate(of_seeds):
            trained(tmp_path, seed, lr, accuracy=accuracy)
    text = reported(tmp_path, "dataset=digits", "format=markdown")
    assert said == text.splitlines()[4].replace("\\", "")
    assert said == json.loads(reported(tmp_path, "dataset=digits", "json=1"))["data"]["conclusion"]


def test_nothing_is_called_the_best_where_no_direction_is_known(tmp_path: Path) -> None:
    runs = [read(trained(tmp_path, lr=lr, metrics={"margin": lr})) for lr in (0.1, 0.2)]
    said = tables.conclusion(compare(grouped(runs)), "margin", None)
    assert (
        said == "None is called the best: it isn't known whether a larger margin is better. A has margin 0.1000 (n 1)."
    )


def test_a_field_that_varies_has_a_column(tmp_path: Path, reported: Printed) -> None:
    runs = [trained(tmp_path, seed, lr, note=note) for lr in (0.1, 0.2) for note in ("x", "y") for seed in (0, 1)]
    reported(tmp_path, "dataset=digits", f"file={tmp_path}/page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<h1>digits small_cnn sgd: note × lr</h1>" in text
    heads = re.findall(r'<th scope="col">(.*?)</th>', text.replace("<wbr>", ""))
    assert heads[:5] == ["configuration", "note", "lr", "n", "test/accuracy"]
    reported(tmp_path, runs[0].key, f"file={tmp_path}/page.html")
    assert "<h1>digits small_cnn sgd lr=0.1 seed=0</h1>" in (tmp_path / "page.html").read_text()


def test_two_fields_make_a_grid_and_differences_from_the_best_are_drawn(tmp_path: Path, reported: Printed) -> None:
    for lr in (0.1, 0.2):
        for size in (64, 128):
            for seed in (0, 1):
                trained(tmp_path, seed, lr, accuracy=0.9 - lr + size / 1000 + seed / 100, trainer={"size": size})
    reported(tmp_path, "dataset=digits", f"file={tmp_path}/page.html")
    text = (tmp_path / "page.html").read_text()
    labels = [str(item["aria-label"]) for item in Page(text).all("svg")]
    assert labels[0] == "differences from the best in test/accuracy, images_per_s, train_s: " + ", ".join(
        ["B  lr 0.1, size 64", "C  lr 0.2, size 128", "D  lr 0.2, size 64"]
    )
    assert labels[-1] == "test/accuracy by lr and size: 4 cells"
    assert "A lr 0.1" not in labels[0]
    assert "<title>B optimizer.lr=0.1 trainer.size=64: test/accuracy 0.8690 ± 0.0071</title>" in text


def test_a_report_of_several_runs_prints_their_figures(tmp_path: Path, reported: Printed) -> None:
    keys = [trained(tmp_path, lr=lr, accuracy=accuracy).key for lr, accuracy in ((0.1, 0.9), (0.2, 0.8))]
    said = reported(tmp_path, *keys)
    assert re.search(r"^configuration +n +.*test/accuracy", said, re.MULTILINE), said
    assert re.search(r"^A optimizer\.lr=0\.1 +1 +.*0\.9000", said, re.MULTILINE), said


def test_a_run_has_a_page_of_its_own_that_says_why_it_was_made(tmp_path: Path, reported: Printed) -> None:
    base, run = trained(tmp_path), trained(tmp_path, 1)
    verdict = {"reproduced": True, "compared": "weights_sha256"}
    write_json(tmp_path / ".reproduced" / run.key / "verdict.json", verdict)
    assert f"{run.key}.html" in reported(tmp_path, run.key[:6])
    text = Page((tmp_path / "reports" / f"{run.key}.html").read_text()).text
    assert f"the nearest other finished run is {base.key}; it differs in: seed: 0 → 1" in text
    assert "reproduced: weights_sha256, metrics and steps are equal" in text
    assert f"doit reproduce {run.key}" in text
    assert "ab" * 32 in text


def test_a_report_is_also_markdown_and_json_at_a_place_of_ones_own(tmp_path: Path, reported: Printed) -> None:
    a_sweep(tmp_path)
    markdown = reported(tmp_path, "sweep=tuned", "format=markdown")
    assert markdown.startswith("# digits small\\_cnn sgd: note × lr\n\nSweep tuned: 4 of 5 runs finished")
    assert "## Not finished" in markdown
    assert "<script>" not in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).replace("&lt;script>", "")
    assert reported(tmp_path, "seed=0", "format=json", f"file={tmp_path}/r.json") == f"{tmp_path}/r.json\n"
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["curves"]["val/accuracy"]["A"][-1] == [50.0, 0.8, None, 1]
    assert json.loads(reported(tmp_path, "json=1"))["data"]["total"] == 5  # what scripts read of a sweep stays


def test_a_trial_without_a_run_folder_is_shown_with_its_state(tmp_path: Path, reported: Printed) -> None:
    folders = [trained(tmp_path, seed) for seed in range(4)]
    swept(tmp_path, folders, ["seed=range(4)"])
    entries = [
        {"number": number, "key": folders[number].key, "state": state, "time": 1.0, "detail": detail}
        for number, state, detail in ((1, "FAILED", "no|data https://me:hunter22hunter@host"), (2, "FINISHED", ""))
    ]
    journal = tmp_path / "sweeps" / "tuned" / "journal.jsonl"
    journal.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    for folder in folders[1:3]:
        shutil.rmtree(folder.path)
    (folders[3].path / "key.json").unlink()
    markdown = reported(tmp_path, "format=markdown")
    assert "1 of 4 runs finished" in markdown
    assert f"- {folders[1].key} optimizer.lr=0.1 seed=1 FAILED: no\\|data https://***@host" in markdown
    assert f"- {folders[2].key} optimizer.lr=0.1 seed=2 FINISHED: its run folder isn't here any more" in markdown
    assert f"{folders[3].key} (none of its runs is finished, 1 ALTERED)" in markdown
    reported(tmp_path)
    page = Page((tmp_path / "reports" / "sweep-tuned.html").read_text()).text
    assert f"{folders[1].key} optimizer.lr=0.1 seed=1 FAILED no|data" in page


@pytest.mark.parametrize(
    "text", [r"a|b", r"a\|b", "a\\", r"\|", "`a|b`", "~~x~~", "*b* _i_", "<b>&amp;", "[x](y)", "$x$ $y$"]
)
def test_a_cell_of_markdown_says_what_stands_in_it(text: str) -> None:
    rendered = (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .render("| a | b |\n| - | - |\n" + tables.row((text, "x")))
    )
    (cells,) = re.findall(r"<td>(.*)</td>\n<td>(.*)</td>", rendered)
    assert [html.unescape(cell) for cell in cells] == [text, "x"]
    assert "$" not in tables.row((text,)).replace(r"\$", "")  # a formula, to GitHub and to pandoc


def test_a_command_of_markdown_can_be_copied(tmp_path: Path, reported: Printed) -> None:
    words = ["model.name=`a|b`_c_", "note=```"]
    run = trained(tmp_path, provenance={"overrides": words})
    said = reported(tmp_path, run.key, "format=markdown")
    assert f"\n````sh\ndoit train 'model.name=`a|b`_c_' 'note=```'  # {run.key}\n````" in said
    assert said.count("````\ndoit train") == 1


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
    for name, kind in {"pipe": "a pipe", "link": "a symbolic link"}.items():
        with pytest.raises(UsageError, match=rf"file=.*{name}\.html is {kind}, and only a regular file is replaced"):
            reported(tmp_path, run.key, f"file={tmp_path}/{name}.html")
    with pytest.raises(UsageError, match=r"there is no folder .*/nonexistent\n  try: mkdir -p "):
        reported(tmp_path, run.key, f"file={tmp_path}/nonexistent/a.html")
    assert (tmp_path / "pipe.html").is_fifo()
    assert (tmp_path / "link.html").is_symlink()
    assert not (tmp_path / "nonexistent").exists()


def test_the_steps_that_the_data_came_of_stand_beside_it(tmp_path: Path, reported: Printed) -> None:
    for name, files, data in (
        ("split-0123456789ab", {"part.csv": "1" * 64}, {"raw/all.csv": "0" * 64}),
        ("clean-aaaaaaaaaaaa", {"images.npz": "8" * 64}, {"step:split/part.csv": "7" * 64}),
        ("clean-ba9876543210", {"images.npz": "2" * 64}, {"step:split/part.csv": "1" * 64}),
    ):
        record = {"name": name.partition("-")[0], "files": files, "parts": {"data": data}}
        write_json(tmp_path / "steps" / name / "step.json", record)
    run = trained(tmp_path, dataset={"name": "arrays", "source": "step:clean"})
    origin = tmp_path / "steps" / "clean-ba9876543210" / "out" / "images.npz"
    write_json(run.path / "data" / "stamps.json", {"origin": str(origin)})
    made = read(run).made_with
    assert made == PastStep(name="clean", key="ba9876543210", needs=(PastStep(name="split", key="0123456789ab"),))
    reported(tmp_path, run.key)
    page = (tmp_path / "reports" / f"{run.key}.html").read_text()
    assert "</code> from step clean ba9876543210 (step split 0123456789ab before it)</td>" in page
    (run.path / "data" / "stamps.json").unlink()
    assert read(run).made_with == PastStep(name="clean")


def test_a_page_shows_the_pictures_of_the_best_runs_evaluation(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    (run.path / "evaluation" / "overview.png").write_bytes(b"a picture")
    reported(tmp_path, run.key)
    pictures = [item["src"] for item in Page((tmp_path / "reports" / f"{run.key}.html").read_text()).all("img")]
    names = ("evaluation/confusion_matrix.png", "evaluation/overview.png")
    encoded = [base64.b64encode((run.path / name).read_bytes()).decode() for name in names]
    assert pictures == [f"data:image/png;base64,{text}" for text in encoded]
    script = trained(tmp_path, program={"name": "script", "script": "a.py"})
    shutil.rmtree(script.path / "evaluation")
    reported(tmp_path, script.key)
    assert Page((tmp_path / "reports" / f"{script.key}.html").read_text()).all("img") == []


def test_a_loss_that_is_negative_has_a_curve(tmp_path: Path, reported: Printed) -> None:
    """Of a likelihood or a reward: a logarithmic axis shows none of it."""
    run = trained(tmp_path)
    write_curve(run, 0.9, {step: -float(step) for step in range(10, 60, 10)})
    reported(tmp_path, run.key)
    text = (tmp_path / "reports" / f"{run.key}.html").read_text()
    assert 'aria-label="train/loss over step: 1 curve; A ends at -50"' in text
    assert "logarithmic</span>" not in text.partition("</style>")[2]


@pytest.mark.parametrize(
    ("names", "goals", "by"),
    [
        (["grad_norm", "images_per_s", "loss", "train_s"], {}, "loss"),  # not by how fast it was
        (["grad_norm", "loss"], {"grad_norm": "minimize"}, "grad_norm"),
        (["grad_norm", "margin"], {}, "grad_norm"),
        ([], {}, ""),
    ],
)
def test_configurations_stand_in_the_order_of_a_metric_that_says_what_is_better(
    names: list[str], goals: dict[str, str], by: str
) -> None:
    assert report._first_by(names, goals) == by
