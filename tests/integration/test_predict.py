"""Image files classified by the network of a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.integration.commands import ALONE, Project

WORDS = ("experiment=quickstart", "tracking=none", *ALONE)


@pytest.mark.long
@pytest.mark.ci
def test_images_are_classified_by_the_network_of_a_run(project: Project, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits  # a second, for this test alone

    digits = load_digits()
    paths = [tmp_path / f"{digits.target[at]}.png" for at in range(5)]
    for at, path in enumerate(paths):
        Image.fromarray((digits.images[at] * 255 / 16).astype("uint8")).resize((48, 64)).save(path)
    project.whole = True  # the weights are those of a real training
    trained = project.doit("train", *WORDS)
    assert trained.returncode == 0, trained.stdout
    found = project.doit("predict", "last", *map(str, paths), "top=1", "json=1", apart=True)
    images = json.loads(found.stdout)["data"]["images"]
    assert [(Path(item["image"]).stem, item["top"][0]["class"]) for item in images] == [
        (str(at), str(at)) for at in range(5)
    ]
    broken = project.doit("predict", "last", str(paths[0]), str(tmp_path / "none.png"))
    assert broken.returncode == 1
    assert "none.png can't be read: No such file or directory; 1 of 2 images" in broken.stdout
    lacking = project.doit("predict", "last", "none.png")
    assert "none.png: there is no such image in" in lacking.stdout
    folder = project.doit("predict", "last", f"{tmp_path}/")
    assert f"{tmp_path}/ is a folder; doit predict takes image files" in folder.stdout
    assert f"try: doit predict last {tmp_path}/*" in folder.stdout


@pytest.mark.ci
@pytest.mark.long
def test_without_an_image_the_words_that_are_wanted_are_named(project: Project) -> None:
    asked = project.doit("predict")
    assert asked.returncode == 3
    assert "which images? doit predict takes a run and image files\n  try: doit predict last cat.jpg" in asked.stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_run_that_is_missing_unfinished_or_altered_is_told(finished: Project, tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "0.png")
    missing = finished.doit("predict", "run=000000", str(tmp_path / "0.png"))
    assert (missing.returncode, "no such run" in missing.stdout) == (3, True), missing.stdout
    words = ("predict", f"run={finished.result()['key']}", str(tmp_path / "0.png"))
    final = finished.only_run() / "checkpoints" / "final.pt"
    final.write_bytes(final.read_bytes()[:-1] + b"x")
    altered = finished.doit(*words)
    assert altered.returncode == 1
    assert "no longer says what its files are (checkpoints/final.pt" in altered.stdout, altered.stdout
    (finished.only_run() / "result.json").unlink()
    unfinished = finished.doit(*words)
    assert (unfinished.returncode, "isn't finished, so it has no final weights" in unfinished.stdout) == (3, True)
