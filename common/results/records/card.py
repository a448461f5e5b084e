"""Machine cards beside each other: what of them tells one machine, or one state of it, from
another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOLATILE = ("load", "pressure", "mhz", "memory_bytes", "dirty", "cpus")
"""What differs from minute to minute, or follows from the rest."""


def flat_card(card: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """What a card says that lasts, without levels: `packages.torch` for torch's version."""
    found: dict[str, Any] = {}
    for key, value in card.items():
        if not above and key in VOLATILE:
            continue
        if isinstance(value, Mapping):
            found |= flat_card(value, f"{above}{key}.")
        else:
            found[above + key] = value
    return found
