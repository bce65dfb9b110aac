"""docs/configuration.md is what the settings classes say, and they say what each field means."""

from __future__ import annotations

from pipeline.config import compose
from tests.architecture import reference


def test_the_page_of_the_configuration_is_current() -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page(), "write it anew: python -m tests.architecture.reference"


def test_every_field_is_there_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in reference.page().splitlines() if line.startswith("| `")]
    fields = {row[0].strip("| `"): row[-1].rstrip(" |") for row in rows if "=" not in row[0]}
    assert [name for name, meaning in fields.items() if not meaning] == []
    composed = compose.resolve(compose.compose_config(["cluster=two_node"]))
    told = {f"{group}.{name}" for group, section in composed.items() if isinstance(section, dict) for name in section}
    repeated = {f"{group}.name" for group in composed} | {"cluster.launcher"}
    assert told - repeated - {"sweep.name"} - fields.keys() == set()
