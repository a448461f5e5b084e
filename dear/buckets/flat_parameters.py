"""`Bucket` by the name and arguments that it had with `spare`; use `flat.value_bucket` instead."""

from __future__ import annotations

from typing import Any

from dear.buckets.flat_values import FlatValues


class FlatParameters(FlatValues):
    """See `dear.buckets.flat.value_bucket`."""

    def __init__(self, *args: Any, shared: bool = False, **layout: Any) -> None:
        super().__init__(*args, shared=shared, spare=True, **layout)
