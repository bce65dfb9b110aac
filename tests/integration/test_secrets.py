"""Secrets reach the ranks and stand nowhere else: every file, both databases and every process list are searched."""

from __future__ import annotations

import gzip
import hashlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.integration.commands import ALONE, ROOT, Project

PRINTS = """
import hashlib, os, sys
seen = {name: os.environ.get(name, "") for name in ("API_TOKEN", "HTTPS_PROXY", "DATA_LOGIN", "CODE_WORD")}
print("the token is", seen["API_TOKEN"], "and all of it", seen, flush=True)
print("on stderr:", seen["CODE_WORD"], file=sys.stderr, flush=True)
with open(os.environ["SEEN"], "w") as file:
    file.write(" ".join(hashlib.sha256(value.encode()).hexdigest() for value in seen.values()))
"""


def files_below(*folders: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file with its bytes; of an archive what is packed in it too."""
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            yield path, content
            if content[:2] == b"\x1f\x8b":
                yield path, gzip.decompress(content)


def command_lines(but: bytes) -> Iterator[bytes]:
    """Those of all processes but the command itself (and its forks, until they execute another program)."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if line != but:
            yield line


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="process lists are read from /proc")
def test_secrets_reach_the_ranks_and_stand_nowhere_else(
    recording: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, password, read, listed = (f"{kind}{secrets.token_hex(12)}" for kind in ("n", "p", "r", "l"))
    own = tmp_path / "python path"
    own.mkdir()
    (own / "sitecustomize.py").write_text(PRINTS)
    monkeypatch.setenv("SOME_PASSWORD", read)
    words = [
        "experiment=quickstart",
        "trainer.max_steps=2",
        *ALONE,
        f"++cluster.env.API_TOKEN={named}",
        f"++cluster.env.HTTPS_PROXY=http://bob:{password}@127.0.0.1:9",
        "++cluster.env.DATA_LOGIN='${oc.env:SOME_PASSWORD}'",
        f"++cluster.env.CODE_WORD={listed}",
        "cluster.secrets=[CODE_WORD]",
        f"++cluster.env.PYTHONPATH='{own}'",
        f"++cluster.env.SEEN='{tmp_path}/seen'",
    ]
    texts = [text.encode() for text in (named, password, read, listed)]

    child = recording.start("sweep", *words)
    typed = "".join(f"{word}\0" for word in cast("list[str]", child.args)).encode()
    while child.poll() is None:
        shown = [line for line in command_lines(but=typed) if any(text in line for text in texts)]
        assert not shown
        time.sleep(0.1)
    output = child.communicate()[0]
    assert child.returncode == 0, output
    given = (named, f"http://bob:{password}@127.0.0.1:9", read, listed)
    assert (tmp_path / "seen").read_text().split() == [hashlib.sha256(text.encode()).hexdigest() for text in given]

    key = recording.run_folders()[0].name
    for verb in (
        ["plan", *words],
        ["why", *words, "json=1"],
        ["export", f"run={key}"],
        ["report"],
        ["logs", f"run={key}"],
    ):
        done = recording.doit(*verb)
        assert done.returncode == 0, done.stdout
        output += done.stdout
    refused = recording.doit("train", *words[:2], "cluster.secrets=[CODE]", f"++cluster.env.API_TOKEN=[{named}")
    output += refused.stdout
    assert "the token is ***" in output
    assert not [text for text in texts if text in output.encode()]

    places = (recording.folder, ROOT / ".paceline")
    found = {path for path, content in files_below(*places) if any(text in content for text in texts)}
    assert not found
    assert any(content.count(b"http://***@127.0.0.1:9") for path, content in files_below(recording.folder / "runs"))


def test_an_error_that_doit_itself_shows_hides_them_too(project: Project) -> None:
    word = f"w{secrets.token_hex(12)}"
    missing = f"dataset.source={project.folder}/{word}"
    done = project.doit("fetch", "dataset=arrays", missing, f"++cluster.env.API_TOKEN={word}")
    assert done.returncode == 1
    assert f"ERROR: dataset.source={project.folder}/***: {project.folder}/*** does not exist" in done.stdout
    assert word not in done.stdout
