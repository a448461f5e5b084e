"""Translates method names and settings of the systems that this project grew from.

Method names and variables come from DeAR's benchmark suite (github.com/lzhangbv/dear_pytorch:
`benchmarks.py` and the `horovod_mpi_cj.sh` of its folders). Arguments come from its
`DistributedOptimizer`. The suite gives sizes as numbers of 4-byte elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from dear.buckets.compressors import SPARSE
from dear.errors import UserError
from dear.training.algorithm import algorithm_names

ELEMENT_BYTES, MIB = 4, 1 << 20
Settings = dict[str, object]
"""Options of an algorithm by name."""
ALIASES: dict[str, tuple[str, Settings]] = {
    "bspa2a": ("allreduce", {}),
    "wfbp2": ("wfbp", {"channels": 2}),
    "mgwfbp2": ("mgwfbp", {"channels": 2}),
    "asc": ("mgwfbp", {"merge": "asc"}),
    "asc2": ("mgwfbp", {"merge": "asc", "channels": 2}),
    "signum": ("mgwfbp", {"merge": "threshold", "threshold_mb": 2048.0, "compression": "signum"}),
    "eftopk": ("mgwfbp", {"merge": "threshold", "threshold_mb": 2048.0, "compression": "eftopk"}),
    "dgcsampling": (
        "mgwfbp",
        {"merge": "threshold", "threshold_mb": 2048.0, "compression": "dgcsampling"},
    ),
    "pytorch-ddp": ("ddp", {}),
    "dear-notf": ("dear", {"fusion": "none"}),
}
"""Algorithm behind each other method name, and the options that differ from its defaults. Methods
that compress put all gradients into one group (their threshold is 536870912 elements)."""
SERVERS = ("bspps", "wfbpps", "byteschedulerps", "byteps")
"""Methods that need a parameter server."""
_WHOLE = 536870912
"""Threshold (elements) that the suite passes to every method except WFBP. Methods that do not use
it keep their own threshold."""
_OFF = {("threshold", str(_WHOLE)), ("autotune", "0")}
"""Further values of variables that request nothing."""


def resolved(name: str, options: Mapping[str, object]) -> tuple[str, Settings]:
    """Returns the algorithm behind `name`, and its options: those of the alias and of `options`.

    Raises:
        UserError: the method needs a parameter server.
    """
    if name in SERVERS:
        raise UserError(
            f"method {name} needs a parameter server, which this project does not have; "
            "use bytescheduler or wfbp, which need none"
        )
    algorithm, defaults = ALIASES.get(name, (name, {}))
    return algorithm, {**defaults, **options}


def suite_name(algorithm: str, options: Mapping[str, object]) -> str:
    """Returns the name in DeAR's suite for an algorithm with these options."""
    for name in ("pytorch-ddp", "dear-notf"):
        aliased, fixed = ALIASES[name]
        if aliased == algorithm and fixed.items() <= options.items():
            return name
    return algorithm


def method(
    name: str, variables: Mapping[str, str], *, limits_credit: bool = True
) -> tuple[str, Settings]:
    """Returns the algorithm and options for a method of DeAR's suite with these variables.

    Args:
        name: an algorithm or an alias.
        variables: given values of `VARIABLES`, as text; an empty text counts as not given.
        limits_credit: False if the engine cannot limit the bytes in flight, as with NCCL. Then the
            suite's default of CREDIT is left out.

    Raises:
        UserError: the method has no such variable, or the variable does not take this value.
    """
    algorithm, options = resolved(name, {})
    given = _Given(name, {key: text for key, text in variables.items() if text != ""})
    _METHODS.get(algorithm, _of_others)(given, options)
    if not limits_credit and not variables.get("CREDIT"):
        options.pop("credit_mb", None)
    if algorithm == "bytescheduler" and options.pop("off", False):
        algorithm = "horovod"
    if algorithm in ("wfbp", "mgwfbp"):
        algorithm = "mgwfbp" if options.get("merge") else "wfbp"
        if options.get("merge") == "greedy":
            del options["merge"]
    given.refuse_others()
    return algorithm, options


def arguments(algorithm: str, given: Mapping[str, object], halves: bool) -> tuple[str, Settings]:
    """Returns algorithm and options for arguments of this project or of DeAR's first optimizer.

    DeAR's arguments are `compression` (a name, or an object with a `name`), `is_sparse`, `density`,
    `threshold` (MB of 2^20 bytes; None for fusion by layers), `num_nearby_layers`, `exclude_parts`
    (a text), `mgwfbp`, `asc`, `fp16`, `seq_layernames` (parameters, first one first) and
    `layerwise_times` (their seconds). `rdma` is ignored: it chose a table of costs, but here costs
    are measured. So is `gradient_path`, as in DeAR. Unsupported arguments raise an error, unless
    they are off.

    Args:
        halves: True if the model's parameters have 16 bits.

    Raises:
        UserError: arguments contradict each other, or are not supported.
    """
    name, result = resolved(algorithm, given)
    for key, why in _REFUSED.items():
        if result.pop(key, None):
            raise UserError(f"{key}: {why}; leave it out")
    for key in ("rdma", "gradient_path"):
        result.pop(key, None)
    if result.pop("fp16", False) and not halves:
        raise UserError("fp16=True: the model's parameters do not have 16 bits; use model.half()")
    merges, asc = result.pop("mgwfbp", False), result.pop("asc", False)
    if merges or asc:
        if name not in ("wfbp", "mgwfbp"):
            raise UserError(f"mgwfbp=True: needs algorithm='mgwfbp' or 'wfbp', got {name!r}")
        name = "mgwfbp"
        if asc:
            result["merge"] = "asc"
    _translate_compression(name, result)
    _translate_fusion(name, result)
    _translate_times(name, result)
    return name, result


_REFUSED = {
    "writer": "writing to TensorBoard is not supported",
    "multi_job_scheduling": "scheduling across jobs is not supported",
}


def _translate_compression(name: str, result: Settings) -> None:
    compression = result.get("compression", "none")
    if getattr(compression, "__name__", "") == "NoneCompressor":  # MG-WFBP's class
        compression = "none"
    if not isinstance(compression, str):
        compression = getattr(compression, "name", None if compression is not None else "none")
    if not isinstance(compression, str):
        raise UserError(f"compression={result['compression']!r}: must be a name, such as 'eftopk'")
    if "compression" in result:
        result["compression"] = compression
    sparse = result.pop("is_sparse", None)
    if sparse and compression == "none":
        raise UserError("is_sparse=True: needs a compression, such as 'eftopk'")
    if not sparse and sparse is not None and compression == "none":
        result.pop("density", None)  # the default, which has no effect without compression
    if sparse is not None and not sparse and compression in SPARSE and result.get("density") != 1:
        raise UserError(
            f"is_sparse=False: compression={compression!r} sends some elements only; leave one of "
            "both out"
        )
    if compression == "none" and name != "mgs":  # which always compresses, and refuses "none"
        result.pop("compression", None)


def _translate_times(name: str, result: Settings) -> None:
    names, times = result.pop("seq_layernames", None), result.pop("layerwise_times", None)
    if names is None and times is None:
        return
    if isinstance(names, Collection) and isinstance(times, Collection) and len(names) == len(times):
        if name == "mgwfbp":  # the other algorithms do not plan by layer times
            result["layer_times"] = dict(zip(names, map(float, times), strict=True))
        return
    raise UserError("seq_layernames and layerwise_times need each other: one time for each name")


def _translate_fusion(name: str, result: Settings) -> None:
    if "threshold" in result:
        threshold = result.pop("threshold")
        if "threshold_mb" in result:
            raise UserError("threshold and threshold_mb mean the same; give only one of them")
        if threshold is None:
            result.setdefault("fusion", "nearby_layers")
        elif threshold:  # 0, DeAR's default, selects the method's own
            result["threshold_mb"] = threshold
    if "num_nearby_layers" in result:
        if "threshold_mb" in result or "nearby_layers" in result:
            raise UserError(
                "num_nearby_layers needs threshold=None, and excludes nearby_layers, which means "
                "the same"
            )
        result["nearby_layers"] = result.pop("num_nearby_layers")
        result.setdefault("fusion", "nearby_layers")
    parts = result.get("exclude_parts")
    if isinstance(parts, str):
        result["exclude_parts"] = tuple(parts.replace(",", " ").split())
        if not parts and name != "dear":
            del result["exclude_parts"]


class _Given:
    """Given variables of a method; reading removes one, and `refuse_others` refuses those left."""

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        self._name, self._left = name, dict(variables)

    def text(self, key: str, default: object = "") -> str:
        return self._left.pop(key, str(default))

    def has(self, key: str) -> bool:
        return key in self._left

    def number(self, key: str, default: object, least: int = 0) -> int:
        text = self.text(key, default)
        if not text.isdigit() or int(text) < least:
            raise UserError(f"{key}={text}: must be a whole number, at least {least}")
        return int(text)

    def switch(self, key: str, default: bool) -> bool:
        text = self.text(key, str(int(default)))
        if text not in ("0", "1"):
            raise UserError(f"{key}={text}: must be 0 or 1")
        return text == "1"

    def refuse_others(self) -> None:
        for key, text in self._left.items():
            if text != VARIABLES[key] and (key, text) not in _OFF:
                raise UserError(f"{key}={text}: method {self._name} has no such variable")


VARIABLES = {
    "nstreams": "1",
    "mgwfbp": "0",
    "asc": "0",
    "threshold": "0",
    "compressor": "none",
    "density": "1",
    "exclude_parts": "",
    "autotune": "",
    "USE_BYTESCHEDULER": "1",
    "CREDIT_TUNING": "0",
    "CREDIT": "16000000",
    "PARTITION": "4000000",
    "use_zero": "0",
}
"""Variables of the suite's launch scripts that concern a method, each with the value that requests
nothing."""


def _compression(given: _Given, options: Settings) -> bool:
    """Puts the given compression into `options`; returns True if gradients are compressed."""
    name = given.text("compressor", options.get("compression", "none"))
    if name != "none":
        options["compression"] = name
    if not given.has("density"):
        return name != "none"
    text = given.text("density")
    try:
        density = float(text)
    except ValueError:
        raise UserError(f"density={text}: must be a number") from None
    if name == "none" and density != 1:
        raise UserError(f"density={text}: needs a compressor, such as compressor=topk")
    if name != "none":
        options["density"] = density
    return name != "none"


def _of_wfbp(given: _Given, options: Settings) -> None:
    streams = given.number("nstreams", options.pop("channels", 1), least=1)
    if streams > 1:
        options["channels"] = streams
    merge = options.pop("merge", None)
    asc = given.switch("asc", merge == "asc")
    merges = given.switch("mgwfbp", merge in ("greedy", "asc"))
    if asc and not merges:
        raise UserError("asc=1: needs mgwfbp=1")
    compressed = _compression(given, options)
    threshold = given.number("threshold", 0)
    if merges:
        if threshold not in (0, _WHOLE):
            raise UserError(f"threshold={threshold}: needs mgwfbp=0; mgwfbp=1 has no threshold")
        options.pop("threshold_mb", None)  # of the names that compress
        options["merge"] = "asc" if asc else "greedy"
        return
    if threshold:
        options["threshold_mb"] = _mb(threshold)
    elif compressed:
        options.setdefault("threshold_mb", _mb(67108864))
    if "threshold_mb" in options:
        options["merge"] = "threshold"


def _of_mgwfbp(given: _Given, options: Settings) -> None:
    options.setdefault("merge", "greedy")
    _of_wfbp(given, options)


def _of_dear(given: _Given, options: Settings) -> None:
    _compression(given, options)
    threshold = given.number("threshold", 0)
    if threshold not in (0, _WHOLE):
        options["threshold_mb"] = _mb(threshold)
    parts = given.text("exclude_parts").replace(",", " ").split()
    if parts:
        options["exclude_parts"] = parts


def _of_horovod(given: _Given, options: Settings) -> None:
    words = given.text("autotune").split()
    if words not in ([], ["0"], ["1"], ["--autotune"]):
        raise UserError(f"autotune={' '.join(words)}: must be 1 or --autotune")
    if words not in ([], ["0"]):
        options["autotune"] = True


def _of_bytescheduler(given: _Given, options: Settings) -> None:
    options["off"] = not given.switch("USE_BYTESCHEDULER", True)
    if options["off"]:
        for key in ("CREDIT", "CREDIT_TUNING", "PARTITION"):
            if given.has(key):
                raise UserError(f"{key}: no effect with USE_BYTESCHEDULER=0; leave it out")
        return
    tuned = given.switch("CREDIT_TUNING", False)
    credit = given.number("CREDIT", int(VARIABLES["CREDIT"]), least=1)
    partition = given.number("PARTITION", int(VARIABLES["PARTITION"]), least=1)
    options |= {"credit_mb": _mb(credit), "partition_mb": _mb(partition)}
    if tuned:
        options["tune"] = "credit"


def _of_ddp(given: _Given, options: Settings) -> None:
    if given.switch("use_zero", False):
        options["zero"] = True


def _of_others(given: _Given, options: Settings) -> None:
    if given.text("compressor", "none") != "none":
        raise UserError(
            "compressor: the methods that compress are "
            + ", ".join(name for name in _METHODS if name in ("wfbp", "mgwfbp", "dear"))
        )


_METHODS: dict[str, Callable[[_Given, Settings], None]] = {
    "wfbp": _of_wfbp,
    "mgwfbp": _of_mgwfbp,
    "dear": _of_dear,
    "horovod": _of_horovod,
    "bytescheduler": _of_bytescheduler,
    "ddp": _of_ddp,
}


def names() -> list[str]:
    """Returns the names of all algorithms and aliases, sorted."""
    return sorted([*algorithm_names(), *ALIASES])


def _mb(elements: int) -> float:
    return elements * ELEMENT_BYTES / MIB
