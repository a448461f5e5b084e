"""Comparison of machine cards: facts that identify a machine and the state of its software."""

from __future__ import annotations

from collections.abc import Mapping

VOLATILE = ("load", "pressure", "mhz", "memory_bytes", "dirty", "cpus")
"""Facts that change from minute to minute, or follow from the others."""


def flat_card(card: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Returns the lasting facts of a card on one level: `packages.torch` has torch's version."""
    facts: dict[str, object] = {}
    for key, value in card.items():
        if not above and key in VOLATILE:
            continue
        if isinstance(value, Mapping):
            facts |= flat_card(value, f"{above}{key}.")
        else:
            facts[above + key] = value
    return facts
