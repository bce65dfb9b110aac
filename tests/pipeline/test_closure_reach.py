"""How far the closure reaches: the project, editable installs, distributions by their names. The rest is refused."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from pipeline.keys import script_files
from pipeline.keys.import_closure import Closure, import_closure
from tests.integration.commands import ROOT

ENTRY = "trainers.classifier"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def project(root: Path, source: str, files: dict[str, str] | None = None) -> Path:
    """A node half whose entry is ``source``, and more files."""
    return write(root, {"trainers/__init__.py": "", "trainers/classifier.py": source, **(files or {})})


def closure(root: Path, *behind: Path) -> Closure:
    importlib.invalidate_caches()  # a later command would look anew
    return import_closure(root, ENTRY, [str(folder) for folder in behind])


def reached(root: Path, *behind: Path) -> set[str]:
    return {*closure(root, *behind).digests} - {"trainers/__init__.py", "trainers/classifier.py"}


def distribution(
    site: Path, name: str, version: str, files: dict[str, str], url: Mapping[str, object] | None = None
) -> None:
    """As an installer leaves it: the files, and what they are told by."""
    write(site, files)
    info = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    if url is not None:
        info["direct_url.json"] = json.dumps(url)
    record = [f"{path},sha256={hash(text):x},{len(text)}" for path, text in files.items()]
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    write(site, {f"{folder}/{file}": text for file, text in {**info, "RECORD": "\n".join(record) + "\n"}.items()})


# --------------------------------------------------------------------------------- the project's own modules
def test_a_package_beside_the_node_half_is_followed_and_one_constant_in_it_counts(tmp_path: Path) -> None:
    root = project(
        tmp_path, "from mylib.nets import f", {"mylib/__init__.py": "", "mylib/nets.py": "from . import scale"}
    )
    write(root, {"mylib/scale.py": "SCALE = 1.0\n"})
    before = closure(root).digests
    assert reached(root) == {"mylib/__init__.py", "mylib/nets.py", "mylib/scale.py"}
    write(root, {"mylib/scale.py": "SCALE = 7.0\n"})
    changed = {name for name, digest in closure(root).digests.items() if digest != before[name]}
    assert changed == {"mylib/scale.py"}


@pytest.mark.parametrize(
    ("source", "files", "expected"),
    [
        ("import alone", ["alone.py"], {"alone.py"}),
        ("import space.deep.a", ["space/deep/a.py", "space/deep/b.py"], {"space/deep/a.py"}),
        ("from space import a", ["space/a.py"], {"space/a.py"}),
        ("import importlib\nimportlib.import_module('space.a')", ["space/a.py"], {"space/a.py"}),
        ("from importlib import import_module\nimport_module('.a', __package__)", ["trainers/a.py"], {"trainers/a.py"}),
        ("__import__('alone')", ["alone.py"], {"alone.py"}),
        ("from importlib import import_module\nimport_module('.a', 'space')", ["space/a.py"], {"space/a.py"}),
        ("import importlib as i\ni.import_module(name='.a', package='space')", ["space/a.py"], {"space/a.py"}),
        ("__import__('a', globals(), locals(), ['x'], 1)", ["trainers/a.py", "a.py"], {"trainers/a.py"}),
        ("from importlib import import_module\nimport_module('.a', __package__ + '.deep')", ["trainers/a.py"], set()),
        ("NETS = {'x': 'space.a:Net'}", ["space/a.py"], {"space/a.py"}),
        ("if True:\n    import alone\nelse:\n    import other", ["alone.py", "other.py"], {"alone.py", "other.py"}),
        ("try:\n    import alone\nexcept ImportError:\n    import other", ["other.py"], {"other.py"}),
        ("async def f():\n    with x:\n        import alone", ["alone.py"], {"alone.py"}),
        ("x = 1", ["tests/test_a.py", "space/a.py"], set()),
        ("import both", ["both.py", "both/__init__.py"], {"both/__init__.py"}),
    ],
)
def test_modules_are_found_as_python_finds_them(
    tmp_path: Path, source: str, files: list[str], expected: set[str]
) -> None:
    write(project(tmp_path, source), dict.fromkeys(files, ""))
    assert reached(tmp_path) == expected


def test_what_a_star_brings_along_is_followed(tmp_path: Path) -> None:
    root = project(tmp_path, "from mylib import *", {"mylib/__init__.py": "__all__ = ['a']\n__all__ += ['c']"})
    write(root, dict.fromkeys((f"mylib/{name}.py" for name in "abcde"), ""))
    assert reached(root) == {"mylib/__init__.py", "mylib/a.py", "mylib/c.py"}
    write(root, {"mylib/__init__.py": "__all__ = []\n__all__.append('d')\n__all__.extend(['e'])"})
    assert reached(root) == {"mylib/__init__.py", "mylib/d.py", "mylib/e.py"}


def test_a_compiled_module_counts_by_its_bytes(tmp_path: Path) -> None:
    root, name = project(tmp_path, "import fast"), f"fast{EXTENSION_SUFFIXES[0]}"
    (root / name).write_bytes(b"\x7fELF\0 1")
    before = closure(root)
    assert before.sources[name] == root / name
    (root / name).write_bytes(b"\x7fELF\0 2")
    assert closure(root).digests[name] != before.digests[name]


# ------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    "source", ["import nowhere_to_be", "def f():\n    import nowhere_to_be", "import trainers.gone"]
)
def test_an_import_that_leads_nowhere_is_refused_with_its_place(tmp_path: Path, source: str) -> None:
    name, line = source.rpartition(" ")[2], source.count("\n") + 1
    with pytest.raises(
        UsageError, match=rf"^trainers/classifier\.py:{line} imports {name}: neither a file of the proj"
    ):
        closure(project(tmp_path, source))


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import nowhere_to_be\nexcept ImportError:\n    pass",
        "try:\n    import nowhere_to_be\nexcept (KeyError, ModuleNotFoundError):\n    pass",
        "from contextlib import suppress\nwith suppress(ImportError):\n    import nowhere_to_be",
        "import sys\nif sys.version_info < (3, 11):\n    import nowhere_to_be",
        "import importlib.util\nimportlib.util.find_spec('nowhere_to_be')",
    ],
)
def test_a_module_that_may_be_missing_is_noted_as_absent_and_counts_once_it_is_there(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, site = project(tmp_path / "project", source), write(tmp_path / "site", {"README.txt": ""})
    monkeypatch.syspath_prepend(site)
    assert closure(root).versions == {"nowhere_to_be": "absent"}
    distribution(site, "nowhere", "1.5", {"nowhere_to_be.py": ""})
    assert closure(root).versions == {"nowhere": "1.5"}


def test_an_import_for_the_type_checker_alone_is_none(tmp_path: Path) -> None:
    source = "import typing as t\nif t.TYPE_CHECKING:\n    import nowhere_to_be\nelse:\n    import alone"
    assert reached(project(tmp_path, source, {"alone.py": ""})) == {"alone.py"}
    assert closure(tmp_path).versions == {}


@pytest.mark.parametrize(
    "source", ["import pipeline.core.files", "try:\n    from pipeline.core import files\nexcept ImportError: 0"]
)
def test_the_controllers_half_is_not_to_be_imported(tmp_path: Path, source: str) -> None:
    with pytest.raises(
        UsageError, match=r"^trainers/classifier\.py:\d imports pipeline.*: the controller's half, which"
    ):
        closure(project(tmp_path, source, {"pipeline/__init__.py": "", "pipeline/core/files.py": ""}))


def test_a_module_that_no_distribution_put_there_is_refused_with_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = write(tmp_path / "site", {"loose_one.py": ""})
    monkeypatch.syspath_prepend(site)
    with pytest.raises(
        UsageError, match=rf":1 imports loose_one: would come from {site}/loose_one, which no installed"
    ):
        closure(project(tmp_path / "project", "import loose_one"))


def test_the_working_tree_is_not_to_stand_behind_the_snapshot(tmp_path: Path) -> None:
    root = project(tmp_path, "import sys, __main__")
    assert closure(root, tmp_path / "elsewhere").versions == {}
    with pytest.raises(UsageError, match=rf"^cluster\.env\.PYTHONPATH names the project's own folder {root}/"):
        closure(root, Path(f"{root}/trainers/.."))


# ------------------------------------------------------------------------------- distributions by their names
def test_distributions_go_by_their_own_names_those_of_a_namespace_by_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    distribution(site, "Pil_Low", "11.0", {"PILx/__init__.py": "", "PILx/Image.py": ""})
    distribution(site, "proto.buf", "6.1", {"goo/protobuf/__init__.py": "", "goo/_upb.so": ""})
    distribution(site, "goo-auth", "2.0", {"goo/auth/__init__.py": "", "goo/cloud/a/__init__.py": ""})
    distribution(site, "goo-b", "3.0", {"goo/cloud/b.py": "", "goo/both/x.py": ""})

    def versions(source: str) -> dict[str, str]:
        return dict(closure(project(tmp_path / "project", source)).versions)

    assert versions("from PILx import Image") == {"pil-low": "11.0"}
    assert versions("import goo.protobuf.message") == {"proto-buf": "6.1"}
    assert versions("from goo import protobuf") == {"proto-buf": "6.1"}
    assert versions("from goo.protobuf import Message\nimport goo.auth") == {"proto-buf": "6.1", "goo-auth": "2.0"}
    assert versions("import goo.cloud.b") == {"goo-b": "3.0"}
    assert versions("import goo.cloud.a.deep") == {"goo-auth": "2.0"}
    assert versions("import goo") == {"proto-buf": "6.1", "goo-auth": "2.0", "goo-b": "3.0"}


@pytest.mark.slow
def test_the_names_that_this_environment_has_are_known(tmp_path: Path) -> None:
    source = "import PIL.Image\nimport yaml\nimport google.protobuf\nfrom sklearn import svm\n"
    assert {*closure(project(tmp_path, source)).versions} == {"pillow", "protobuf", "pyyaml", "scikit-learn"}


def test_a_distribution_that_lists_no_files_goes_by_what_it_says_or_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's packages have no RECORD."""
    site = write(tmp_path / "site", {"told.py": "", "calledso/__init__.py": ""})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site)])
    write(
        site, {"other-2.dist-info/METADATA": "Name: other\nVersion: 2\n", "other-2.dist-info/top_level.txt": "told\n"}
    )
    write(site, {"calledso-3.dist-info/METADATA": "Name: calledso\nVersion: 3\n"})
    found = closure(project(tmp_path / "project", "import told, calledso")).versions
    assert found == {"calledso": "3", "other": "2"}


def test_another_version_and_other_content_of_one_that_no_index_gave_are_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, site = project(tmp_path / "project", "import thing"), tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    distribution(site, "thing", "1.0", {"thing.py": "x = 1"})
    assert closure(root).versions == {"thing": "1.0"}
    subprocess.run(["rm", "-r", str(site / "thing-1.0.dist-info")], check=True)
    distribution(site, "thing", "1.1", {"thing.py": "x = 2"})
    assert closure(root).versions == {"thing": "1.1"}
    seen = set()
    for text in ("x = 3", "x = 4", "x = 3"):
        distribution(site, "thing", "1.1", {"thing.py": text}, {"url": "file:///src", "dir_info": {}})
        seen.add(closure(root).versions["thing"])
    assert len(seen) == 2
    assert all(shown.startswith("1.1 (content ") for shown in seen)


# ------------------------------------------------------------------------- sources that aren't in the project
def test_an_editable_install_is_followed_hashed_and_copied_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, site, source = project(tmp_path / "project", "import thing.a"), tmp_path / "site", tmp_path / "thing/src"
    write(
        source, {"thing/__init__.py": "", "thing/a.py": "from . import b\nimport missing_there", "thing/b.py": "B = 1"}
    )
    write(source, {"thing.egg-info/top_level.txt": "thing\n", "thing.egg-info/PKG-INFO": "Name: thing\nVersion: 1\n"})
    origin = {"url": f"file://{tmp_path}/thing", "dir_info": {"editable": True}}
    distribution(site, "thing", "1.0", {"__editable__.thing.pth": str(source)}, origin)
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(source)
    before = closure(root)
    assert reached(root) == {"thing/__init__.py", "thing/a.py", "thing/b.py"}
    assert before.sources["thing/b.py"] == source / "thing/b.py"
    assert before.versions == {"missing_there": "absent"}
    write(source, {"thing/b.py": "B = 2"})
    assert closure(root).digests["thing/b.py"] != before.digests["thing/b.py"]


@pytest.mark.slow
def test_an_editable_install_by_setuptools_own_finder_is_followed(tmp_path: Path) -> None:
    """A real build of a project whose folders aren't named as its packages, so that no line of a .pth can do."""
    pytest.importorskip("setuptools")
    source = write(tmp_path / "thing", {"lib/__init__.py": "from thing import more", "lib/more.py": "M = 1"})
    about = '[project]\nname = "thing"\nversion = "1.0"\n[tool.setuptools]\npackages = ["thing"]\n'
    write(source, {"pyproject.toml": f'{about}package-dir = {{thing = "lib"}}\n'})
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    origin = {"url": source.as_uri(), "dir_info": {"editable": True}}
    write(tmp_path / "site/thing-1.0.dist-info", {"direct_url.json": json.dumps(origin)})
    root = project(tmp_path / "project", "import thing")
    code = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); from pathlib import Path; "
        f"from pipeline.keys.import_closure import import_closure; "
        f"found = import_closure(Path({str(root)!r}), {ENTRY!r}); "
        "print({name: str(path) for name, path in found.sources.items() if name.startswith('thing')})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {"thing/__init__.py": f"{source}/lib/__init__.py", "thing/more.py": f"{source}/lib/more.py"}
    assert done.stdout == f"{expected}\n"


def test_what_the_ranks_path_names_is_followed_and_one_that_is_on_hosts_alone_is_refused(tmp_path: Path) -> None:
    root = project(tmp_path / "project", "import theirs")
    mine = write(tmp_path / "mine", {"theirs.py": "A = 1"})
    assert closure(root, mine).sources["theirs.py"] == mine / "theirs.py"
    with pytest.raises(UsageError, match=r":1 imports theirs: neither"):
        closure(root, tmp_path / "on_hosts_alone")
    distribution(mine, "theirs", "4.0", {"theirs.py": ""})
    assert closure(root, mine).versions == {"theirs": "4.0"}


def test_what_stands_on_the_ranks_path_before_installed_modules_counts_though_the_project_imports_none_of_it(
    tmp_path: Path,
) -> None:
    root = project(tmp_path / "project", "")
    files = {"sitecustomize.py": "A = 1", "usercustomize.py": "", "random.py": "", "yaml/__init__.py": "", "own.py": ""}
    mine = write(tmp_path / "mine", {**files, "markdown/notes.txt": "no module", "json/notes.txt": "shadows nothing"})
    before = closure(root, mine)
    counted = {"sitecustomize.py", "usercustomize.py", "random.py", "yaml/__init__.py"}
    assert {*before.digests} - {"trainers/__init__.py", "trainers/classifier.py"} == counted
    write(mine, {"sitecustomize.py": "A = 7", "own.py": "A = 7"})
    after = closure(root, mine)
    assert {name for name in after.digests if after.digests[name] != before.digests[name]} == {"sitecustomize.py"}
    distribution(mine, "PyYAML", "4.0", {"yaml/__init__.py": ""})
    assert closure(root, mine).versions == {"pyyaml": "4.0"}


def test_a_folder_that_holds_byte_code_alone_is_no_package(tmp_path: Path) -> None:
    root = project(tmp_path, "import nets", {"nets/__init__.pyc": ""})
    with pytest.raises(UsageError, match=r":1 imports nets: neither a file of the project"):
        closure(root)


# -------------------------------------------------------------------------------------- data beside modules
def test_the_data_of_a_package_and_what_a_module_names_beside_itself_come_along_by_their_bytes(tmp_path: Path) -> None:
    beside = "from pathlib import Path\nSIZES = (Path(__file__).parent / 'more.json').read_text()\n"
    files = {
        "nets/__init__.py": "",
        "nets/own.py": "",
        "nets/sizes.json": "[1]",
        "nets/tables/a.csv": "1",
        "nets/sub/__init__.py": "",
        "nets/sub/not.json": "1",
        "nets/README.md": "x",
        "nets/outputs/weights.txt": "1",
        "alone.py": beside,
        "more.json": "[2]",
        "other.json": "[3]",
        "plain.py": "open('other.json')\n",
    }
    root = project(tmp_path, "import nets.own, alone, plain", files)
    data = {"nets/sizes.json", "nets/tables/a.csv", "more.json"}
    assert reached(root) == {"nets/__init__.py", "nets/own.py", "alone.py", "plain.py", *data}
    before = closure(root).digests
    (root / "nets/sizes.json").write_text("[9]")
    changed = {name for name, digest in closure(root).digests.items() if before[name] != digest}
    assert changed == {"nets/sizes.json"}
    (root / "nets/large.bin").write_bytes(bytes((1 << 20) + 1))
    assert closure(root).left_out == ("nets/large.bin (1,048,577 bytes)",)
    assert "nets/large.bin" not in closure(root).sources
    taken = script_files.with_model_inputs(closure(root), root, ["nets/*.bin"])
    assert taken.sources["nets/large.bin"] == root / "nets/large.bin"
    with pytest.raises(UsageError, match=r"^model\.inputs: 'nope/\*' matches no file in"):
        script_files.with_model_inputs(closure(root), root, ["nope/*"])
