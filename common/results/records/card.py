"""Machine cards (facts about a machine and its software), in a form to compare them."""

from __future__ import annotations

from collections.abc import Mapping

VOLATILE = ("load", "pressure", "mhz", "memory_bytes", "dirty", "cpus")
"""Facts that are not compared: they change from minute to minute, or follow from others."""


def flat_card(card: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Returns the compared facts of a card as a flat dictionary, with keys as `packages.torch`."""
    facts: dict[str, object] = {}
    for key, value in card.items():
        if not above and key in VOLATILE:
            continue
        if isinstance(value, Mapping):
            facts |= flat_card(value, f"{above}{key}.")
        else:
            facts[above + key] = value
    return facts
