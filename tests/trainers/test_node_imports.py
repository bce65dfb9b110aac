import ast
import sys
from pathlib import Path

import pytest

import trainers

FILES = sorted(Path(trainers.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_node_half_imports_torch_itself_and_the_standard_library_only(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).partition(".")[0])
    own = {"trainers", "paceline"}  # the latter is one file, which travels with scripts
    option = {"torchvision"} if path.parts[-2:] == ("models", "torchvision.py") else set[str]()
    pillow = {"PIL"} if path.name == "image_files.py" else set()  # which only a pack of encoded images needs there
    if path.name == "torchvision_images.py":  # which the controller starts, and no rank
        option = {"torchvision"}
    assert imported <= {"torch", *own, *pillow, *option} | set(sys.stdlib_module_names)


def test_rank_variables_are_read_in_one_file_only() -> None:
    found = {path.name for path in FILES if '"RANK"' in path.read_text() or '"WORLD_SIZE"' in path.read_text()}
    assert found == {"ranks.py"}
