"""Parts of a page that a command writes, between a comment and the next `<!-- end -->`."""

from __future__ import annotations

import re


def written(text: str, mark: str, block: str) -> str:
    """The page `text` with `block` behind the comment `<!-- MARK -->`, up to the next end.

    Raises:
        ValueError: the page has no such place, or several.
    """
    pattern = rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)"
    changed, places = re.subn(
        pattern, lambda found: f"{found[1]}{block}\n{found[2]}", text, flags=re.DOTALL
    )
    if places != 1:
        raise ValueError(f"the page has {places} places for {mark}")
    return changed
