"""Generated blocks of a Markdown page, between a comment and the next `<!-- end -->`."""

from __future__ import annotations

import re


def with_block(text: str, mark: str, block: str) -> str:
    """Returns the page `text` with `block` between `<!-- MARK -->` and the next `<!-- end -->`.
    Raises `ValueError` if the comment `<!-- MARK -->` does not occur exactly once."""
    pattern = rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)"
    changed, places = re.subn(
        pattern, lambda match: f"{match[1]}{block}\n{match[2]}", text, flags=re.DOTALL
    )
    if places != 1:
        raise ValueError(f"the page must contain <!-- {mark} --> once, not {places} times")
    return changed
