"""Keys that stand twice in one mapping of an override, as Hydra's own lexer reads it."""

from __future__ import annotations

from collections.abc import Iterator

from antlr4 import InputStream  # type: ignore[import-untyped]
from hydra.grammar.gen.OverrideLexer import OverrideLexer


def doubled(word: str) -> Iterator[str]:
    """In the order of their second places."""
    lexer = OverrideLexer(InputStream(word))
    lexer.removeErrorListeners()  # Hydra tells what it can't read
    tokens = lexer.getAllTokens()
    open_: list[set[str]] = []
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == OverrideLexer.BRACE_OPEN:
            open_.append(set())
        elif token.type == OverrideLexer.BRACE_CLOSE and open_:
            open_.pop()
        elif open_ and after is not None and after.type == OverrideLexer.COLON:
            if token.text in open_[-1]:
                yield token.text
            open_[-1].add(token.text)
