"""The pages of docs/ are in the site's menu, lead somewhere, show every picture and name the language of each block."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture import commands

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
READ_FIRST = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}


def without_blocks(markdown: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """The addresses of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(markdown), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in plain}


def links(markdown: str) -> Iterator[tuple[str, str]]:
    """The page and the heading of each link that stays in the repository."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(markdown)):
        if "://" not in link:
            page, _, heading = link.partition("#")
            yield page, heading


def test_every_page_is_in_the_menu_once() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(PAGES)


def test_links_between_pages_lead_to_pages_and_headings() -> None:
    missing = []
    for name, text in PAGES.items():
        folder = (DOCS / name).parent
        for page, heading in links(text):
            target = (folder / page).resolve() if page else DOCS / name
            known = target.exists() and (not heading or heading in anchors(target.read_text(encoding="utf-8")))
            if not known:
                missing.append(f"{name}: {page}#{heading}")
    for name, text in READ_FIRST.items():
        for page, heading in links(text):
            if heading and heading not in anchors((ROOT / page).read_text(encoding="utf-8")):
                missing.append(f"{name}: {page}#{heading}")
    assert missing == []


def test_every_picture_is_small_made_by_a_script_and_shown_by_a_page() -> None:
    scripts = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = "\n".join([*PAGES.values(), *READ_FIRST.values()])
    pictures = [path for path in DOCS.rglob("*") if path.suffix in (".svg", ".png", ".webp", ".gif")]
    assert len(pictures) > 5
    assert [path.name for path in pictures if f"{path.parent.name}/{path.name})" not in shown] == []
    assert [path.name for path in pictures if path.name not in scripts or path.stat().st_size >= 300_000] == []


def test_the_page_of_commands_is_current() -> None:
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), (
        "write it anew: python -m tests.architecture.commands"
    )


def test_actions_of_workflows_are_named_by_their_commit() -> None:
    workflows = list((ROOT / ".github/workflows").glob("*.yml"))
    used = [use for path in workflows for use in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))]
    assert len(used) > 8
    assert [use for use in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", use)] == []


def test_hooks_run_the_tools_of_the_environment() -> None:
    entries = re.findall(
        r"entry: .*?\.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    )
    assert entries == ["ruff", "ruff", "lint-imports", "mypy"]
    assert [name for name in set(entries) if not os.access(ROOT / ".venv/bin" / name, os.X_OK)] == []
