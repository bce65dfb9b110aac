"""What init.weights and init.run stand for: the digest counts in the key, and what is wrong is said before a launch."""

from __future__ import annotations

import hashlib
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.cli.commands.clean import needed
from pipeline.config import build
from pipeline.config.build import RunConfig
from pipeline.config.overrides.words import quoted_run
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files import sha256_file, write_json
from pipeline.execution import initial_weights
from pipeline.execution.initial_weights import InitialWeights
from pipeline.execution.run import initial_weights_of
from pipeline.keys.content_key import KEY_VERSION, canonical_config
from tests.pipeline.composed import composed
from tests.pipeline.finished_folder import finished

CONTENT = b"\x80\x02weights"  # as torch.save began before it wrote zip archives
QUICK = ("experiment=quickstart", "tracking=none")


def configured(root: Path, *words: str) -> RunConfig:
    said = (*QUICK, *words, f"paths.runs={root}/runs", f"paths.data={root}/data")
    return build.build(composed(said), said, root=root, local_gpus=0)


def start(root: Path, *words: str) -> InitialWeights:
    found = initial_weights_of(configured(root, *words), root)
    assert found is not None
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "w.pt").write_bytes(CONTENT)
    return tmp_path


def test_a_run_with_fresh_weights_has_no_trace_of_them_in_its_key(root: Path) -> None:
    config = configured(root)
    assert initial_weights_of(config, root) is None
    assert "init" not in canonical_config(config.resolved)


def test_the_file_of_which_the_run_keeps_a_copy_is_known(root: Path) -> None:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    for words in (["init.weights=w.pt"], [f"init.weights=file://{root}/w.pt", f"init.sha256={sha256}"]):
        assert initial_weights.local_file(configured(root, *words), root) == root / "w.pt"
    for word in ("init.weights=0123456789ab", "init.weights=https://example.org/w.pt", "init.weights=null"):
        assert initial_weights.local_file(configured(root, word), root) is None


def test_the_content_of_a_file_counts_in_the_key_and_not_its_name(root: Path) -> None:
    (root / "elsewhere.pth").write_bytes(CONTENT)
    parts = []
    for name in ("w.pt", str(root / "elsewhere.pth"), f"file://{root}/w.pt"):
        config = configured(root, f"init.weights={name}")
        found = start(root, f"init.weights={name}")
        parts.append(canonical_config(found.with_digest(config).resolved))
    assert parts[0] == parts[1] == parts[2]
    assert parts[0]["init"] == {"sha256": hashlib.sha256(CONTENT).hexdigest()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init.weights=v.pt",), "init.weights=v.pt: there is no file {root}/v.pt; did you mean w.pt"),
        (("init.weights=0123456789ab",), "init.weights=0123456789ab: no such run under {root}/runs"),
        (("init.weights=IMAGENET1K_V1",), "init.weights=IMAGENET1K_V1 is a name of torchvision's weights"),
        (("init.weights=w.pt", f"init.sha256={'f' * 64}"), "and init.sha256 says ffff"),
        pytest.param(
            ("init.weights=IMAGENET1K_V9", "model=torchvision"),
            "init.weights=IMAGENET1K_V9: model.arch=resnet18 has no such; did you mean IMAGENET1K_V1",
            marks=[pytest.mark.ci, pytest.mark.long],  # imports torchvision
        ),
        (("init.weights=torn.pt",), "{root}/torn.pt is cut off"),
        (("init.weights=x.safetensors",), "init.weights=x.safetensors: a file of weights ends in .pt"),
    ],
)
def test_what_names_no_weights_is_refused_with_what_is_there(root: Path, words: tuple[str, ...], said: str) -> None:
    (root / "x.safetensors").write_bytes(CONTENT)
    with zipfile.ZipFile(root / "empty.pt", "w") as archive:  # as torch.save({}, path) leaves it
        for name in ("data.pkl", "byteorder", "version", ".data/serialization_id"):
            archive.writestr(f"empty/{name}", b"}")
    (root / "torn.pt").write_bytes((root / "empty.pt").read_bytes()[:50])
    with pytest.raises(UsageError, match=re.escape(said.format(root=root))):
        start(root, *words)


def test_what_is_wrong_with_a_named_run_says_the_setting_once(root: Path) -> None:
    write_json(root / "runs/abcdefabcdef/key.json", {"version": KEY_VERSION})
    with pytest.raises(UsageError) as error:
        start(root, "init.weights=abcdef")
    assert error.value.what == "init.weights=abcdef: run abcdefabcdef isn't finished"
    write_json(root / "runs/abcdefabcdef/key.json", {"version": KEY_VERSION + 1})
    with pytest.raises(UsageError, match=r"^init.weights=abcdef: run abcdefabcdef was written by a newer Paceline"):
        start(root, "init.weights=abcdef")


def test_the_key_of_a_run_stands_for_its_final_weights_and_clean_keeps_it_for_who_is_not_finished(root: Path) -> None:
    folder = finished(root / "runs")
    found = start(root, f"init.weights={folder.key[:6]}")
    assert (found.run, found.path) == (folder.key, folder.path / "checkpoints/final.pt")
    other = root / "runs" / "abcdefabcdef"
    found.put_into(other, root / "data")
    assert (other / "init.pt").read_bytes() == (folder.path / "checkpoints/final.pt").read_bytes()
    why = "run abcdefabcdef, which isn't finished, starts from its weights"
    assert needed(root / "runs") == {folder.key: why}
    (folder.path / "checkpoints/final.pt").write_bytes(b"other")
    with pytest.raises(UsageError, match=r"final.pt (changed|was altered|has)"):
        start(root, f"init.weights={folder.key}")


def test_what_was_kept_is_enough_where_the_digest_is_said(root: Path) -> None:
    sha256 = sha256_file(root / "w.pt")
    initial_weights.store(root / "w.pt", sha256, root / "data")
    (root / "w.pt").unlink()
    found = start(root, "init.weights=w.pt", f"init.sha256={sha256}")
    assert found.path == root / "data" / "weights" / f"{sha256}.pt"
    found.path.write_bytes(b"altered")
    assert initial_weights.stored_copy(sha256, root / "data") is None


# ------------------------------------------------------------------------------------------ init.run
def run_word(said: str) -> str:
    return quoted_run(f"init.run={said}")


def test_the_run_before_has_its_own_words_and_the_cluster_of_the_one_that_names_it(root: Path) -> None:
    said = "experiment=quickstart seed=7 trainer.global_batch_size=66"
    config = configured(root, run_word(said), "cluster.nproc_per_node=3", "trainer.global_batch_size=63")
    parent = config.parent
    assert parent is not None
    assert (parent.resolved["seed"], parent.cluster.world_size, parent.runs_dir) == (7, 3, root / "runs")
    assert parent.overrides[-1] == "trainer.global_batch_size=66"
    found = start(root, run_word("experiment=quickstart seed=7"))
    assert (found.sha256, found.pending) == (None, "its run is to be trained first, whose key isn't known yet")


@pytest.mark.slow
def test_words_of_the_run_before_may_name_their_own_cluster(root: Path) -> None:
    said = "experiment=quickstart cluster=local cluster.nproc_per_node=1"
    parent = configured(root, run_word(said), "cluster.nproc_per_node=4").parent
    assert parent is not None
    assert parent.cluster.world_size == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("experiment=quickstart optimizer.lrr=1", "init.run='experiment=quickstart optimizer.lrr=1': unknown key"),
        ("seed='1", "can't be split into words"),
        ("program.script=train.py", "init.run='program.script=train.py'"),
    ],
)
def test_a_wrong_word_of_the_run_before_is_told_as_its_own(root: Path, said: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=re.escape(wrong)):
        configured(root, run_word(said))


def test_a_run_that_would_start_from_itself_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an experiment's file does whose init.run names the experiment."""
    from pipeline.config import compose

    resolved = composed((*QUICK, run_word("experiment=quickstart")))
    monkeypatch.setattr(compose, "resolve", lambda _: resolved)
    with pytest.raises(
        UsageError, match=r"init.run leads back to itself: experiment=quickstart → experiment=quickstart"
    ):
        build.build(resolved, QUICK, root=root, local_gpus=0)


def test_words_get_the_quotes_that_hydra_wants_once() -> None:
    assert quoted_run("init.run=a=b c=[d,'e']") == r"init.run='a=b c=[d,\'e\']'"
    assert quoted_run("init.run='a=b'") == "init.run='a=b'"
    assert quoted_run("init.run=null") == "init.run=null"
    assert quoted_run("seed=1") == "seed=1"


# ----------------------------------------------------------------------------------------- addresses
@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server of the folder: its address, and what was asked of it."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code: object = "-", size: object = "-") -> None:
            asked.append(self.path)

        def log_error(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "w.pt is empty: it has 0 bytes"),
        (b"<html>sign in</html>", "w.pt is no file of torch.save: it has 20 bytes and begins with b'<html>sign in</h'"),
        (b"PK\x03\x04" + bytes(96), "w.pt is cut off: it has 100 bytes and begins with b'PK"),
    ],
)
def test_a_file_that_torch_has_not_saved_whole_is_refused_before_the_launch(
    root: Path, content: bytes, said: str
) -> None:
    (root / "w.pt").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(f"init.weights=w.pt: {root}/{said}")):
        start(root, "init.weights=w.pt")


@pytest.mark.slow
def test_an_address_is_fetched_once_and_then_stands_for_its_content(root: Path) -> None:
    with served(root) as (address, asked):
        word = f"init.weights={address}/w.pt"
        assert start(root, word).pending == "to be fetched first"
        for _ in range(2):
            path = initial_weights.fetch(f"{address}/w.pt", root / "data", setting=word)
        assert asked == ["/w.pt"]
        assert (start(root, word).path, start(root, word).sha256) == (path, sha256_file(root / "w.pt"))
        with pytest.raises(DataError, match=r"nothing.pt can't be had: HTTP 404") as error:
            initial_weights.fetch(f"{address}/nothing.pt", root / "data", setting=word)
        assert error.value.hint == "get the file by other means, then init.weights=<its path>"


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_torchvision_says_its_address_once_and_the_digest_in_its_name_is_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    assert start(root, "init.weights=default", "model=torchvision").url == known
    monkeypatch.setattr("pipeline.core.processes.process.run", None)  # kept from here on
    assert initial_weights.published_address("resnet18", "IMAGENET1K_V1", root) == known
    with pytest.raises(UsageError, match=r"init.weights=V2: model.arch=resnet18 has no such; .*IMAGENET1K_V1"):
        initial_weights.published_address("resnet18", "V2", root)
    digest = sha256_file(root / "w.pt")
    for name in (f"net-{digest[:8]}.pth", "net-00000000.pth"):
        (root / name).write_bytes(CONTENT)
    with served(root) as (address, _):
        get = partial(initial_weights.fetch, data_dir=root / "data", setting="x", hash_in_name=True)
        assert get(f"{address}/net-{digest[:8]}.pth").read_bytes() == CONTENT
        with pytest.raises(DataError, match=r"has another sha256 than its name says: 00000000"):
            get(f"{address}/net-00000000.pth")
    assert initial_weights.downloaded(f"{address}/net-00000000.pth", root / "data") is None


def test_a_torchvision_that_can_not_be_imported_is_one_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "torchvision").mkdir()
    (root / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(root))
    with pytest.raises(UsageError) as error:
        initial_weights.published_address("resnet18", "default", root)
    assert error.value.what == (
        "init.weights=default: torchvision, which knows the address, can't be imported here: "
        "RuntimeError: operator torchvision::nms does not exist"
    )
    assert error.value.hint == "init.weights=<the address, or a file>"


def test_the_folder_of_a_run_says_where_its_weights_come_from(root: Path) -> None:
    folder = root / "runs" / "abcdefabcdef"
    write_json(folder / "result.json", {})
    start(root, "init.weights=w.pt").put_into(folder, root / "data")
    assert (folder / "init.pt").read_bytes() == CONTENT
    assert needed(root / "runs") == {}
