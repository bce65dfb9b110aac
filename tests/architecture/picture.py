"""docs/images/packages.svg: which package imports which, in the layers of the import contracts, as they are now.

``python -m tests.architecture.picture`` draws it anew. An arrow that a path of other arrows implies is left out (the
transitive reduction of the graph, which is unique as there is no circle).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/images/packages.svg"

Edge = tuple[str, str]
"""Who imports, and what."""

_ROW, _BOX_HEIGHT, _BOX_WIDTH, _HALF_WIDTH, _MARGIN = 36, 24, 130, 400, 12  # px
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
  text {{ font: 13px sans-serif; fill: #24292f; text-anchor: middle; }}
  .layer {{ fill: #f1f3f6; }} .package {{ fill: #ffffff; stroke: #57606a; }}
  .import {{ fill: none; stroke: #57606a; }} .tip {{ fill: #57606a; }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #d0d7de; }} .layer {{ fill: #21262d; }} .package {{ fill: #0d1117; stroke: #8b949e; }}
    .import {{ stroke: #8b949e; }} .tip {{ fill: #8b949e; }}
  }}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>
"""


def layers() -> dict[str, list[list[str]]]:
    """Half → the packages of each layer, from the top, as the contracts in pyproject.toml have them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [re.split(r"\s*[:|]\s*", layer) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
    }


def imports(half: str, packages: Sequence[str]) -> set[Edge]:
    """The pairs of packages of which the first imports a module of the second."""
    graph = grimp.build_graph(half, cache_dir=None)
    modules = {name: {f"{half}.{name}"} | graph.find_descendants(f"{half}.{name}") for name in packages}
    owner = {module: name for name, owned in modules.items() for module in owned}
    found = {
        (name, owner[imported])
        for name, owned in modules.items()
        for module in owned
        for imported in graph.find_modules_directly_imported_by(module)
        if imported in owner
    }
    return {(first, second) for first, second in found if first != second}


def reduced(edges: set[Edge]) -> set[Edge]:
    """Without the edges that a path of others implies."""
    return {edge for edge in edges if not _leads(edges - {edge}, *edge)}


def _leads(edges: set[Edge], start: str, end: str) -> bool:
    following = {second for first, second in edges if first == start}
    return end in following or any(_leads(edges, name, end) for name in following)


def svg() -> str:
    """The whole picture: a half beside the other, a package a row, arrows to what it imports."""
    halves = layers()
    rows = max(sum(len(layer) for layer in layer_list) for layer_list in halves.values())
    parts = [_HEAD.format(width=_HALF_WIDTH * len(halves), height=_ROW * (rows + 1) + _MARGIN)]
    for at, (half, layer_list) in enumerate(halves.items()):
        packages = [name for layer in layer_list for name in layer]
        parts += _half(half, layer_list, reduced(imports(half, packages)), at * _HALF_WIDTH + _MARGIN)
    return "\n".join([*parts, "</svg>", ""])


def _half(half: str, layer_list: Sequence[Sequence[str]], edges: set[Edge], x: int) -> Iterator[str]:
    middle = x + _MARGIN + _BOX_WIDTH / 2
    yield f'<text x="{middle:g}" y="{_ROW - 12}" font-weight="bold">{half}/</text>'
    packages = [name for layer in layer_list for name in layer]
    y = {name: _ROW * (row + 1) + _ROW / 2 for row, name in enumerate(packages)}
    for layer in layer_list:
        top, height = y[layer[0]] - _ROW / 2 + 2, _ROW * len(layer) - 4
        yield f'<rect class="layer" x="{x}" y="{top:g}" width="{_HALF_WIDTH - 2 * _MARGIN}" height="{height}" rx="4"/>'
    right = x + _MARGIN + _BOX_WIDTH
    for first, second in sorted(edges, key=lambda edge: (y[edge[0]], y[edge[1]])):
        bend = right + 20 + (y[second] - y[first]) * 0.45
        yield (
            f'<path class="import" marker-end="url(#tip)" d="M{right},{y[first] + 4:g} C{bend:g},{y[first] + 4:g} '
            f'{bend:g},{y[second] - 4:g} {right},{y[second] - 4:g}"><title>{first} imports {second}</title></path>'
        )
    for name in packages:
        place = f'x="{x + _MARGIN}" y="{y[name] - _BOX_HEIGHT / 2:g}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"'
        yield f'<rect class="package" {place} rx="4"/><text x="{middle:g}" y="{y[name] + 4:g}">{name}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
