"""Records of trials: the source of every table, figure and report."""

from common.results.records.reading import JsonObject, grouped, typed
from common.results.records.record import (
    SCHEMA,
    Bound,
    Failure,
    Order,
    Record,
    SetAside,
    Throughput,
    base_among,
    fabric_words,
    is_learning,
    machine_words,
)
from common.results.records.result import (
    REAL,
    Breakdown,
    DeviceUse,
    FabricFacts,
    Group,
    Plan,
    Result,
)

__all__ = [
    "Bound",
    "Breakdown",
    "DeviceUse",
    "FabricFacts",
    "Failure",
    "Group",
    "JsonObject",
    "Order",
    "Plan",
    "REAL",
    "Record",
    "Result",
    "SCHEMA",
    "SetAside",
    "Throughput",
    "base_among",
    "fabric_words",
    "grouped",
    "is_learning",
    "machine_words",
    "typed",
]
