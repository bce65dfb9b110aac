import ast
import sys
from pathlib import Path

import trainers

PILLOW = {"image_files.py"}  # which only a pack of encoded images needs there
TORCHVISION = {"torchvision_images.py"}  # which the controller starts, and no rank


def test_the_node_half_imports_torch_itself_and_the_standard_library_only() -> None:
    known = {"torch", "trainers", "paceline"} | set(sys.stdlib_module_names)  # paceline travels with scripts
    foreign = []
    for path in Path(trainers.__file__).parent.rglob("*.py"):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).partition(".")[0])
        own = {"PIL"} if path.name in PILLOW else set[str]()
        if path.name in TORCHVISION or path.parts[-2:] == ("models", "torchvision.py"):
            own = {"torchvision"}
        foreign += [(path.name, name) for name in imported - known - own]
    assert foreign == []
