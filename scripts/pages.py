"""Tables that scripts write into pages of docs/, between comments ``NAME: begin`` and ``NAME: end``."""

from __future__ import annotations

from collections.abc import Sequence

from tq_ggml.errors import TqError


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """A table; numbers with four significant digits."""
    cells = [[cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headers, ["-"] * len(headers), *cells))


def put_in(text: str, name: str, content: str) -> str:
    """The page with ``content`` between the marks of that name.

    Raises:
        TqError: the page has no such marks.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    if begin not in text or end not in text:
        raise TqError(f"the page has no marks {begin.strip()} and {end.strip()}")
    return text.split(begin)[0] + begin + content + end + text.split(end, 1)[1]
