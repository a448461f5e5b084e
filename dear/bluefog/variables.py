"""BlueFog's environment variables: what they set here, and why some have no effect."""

from __future__ import annotations

import logging
import os
import re

from dear.buckets.grouping import MIB
from dear.errors import UserError, one_of
from dear.training.parameters.options import BUCKET_MB

log = logging.getLogger("dear")

NODES_PER_MACHINE = "BLUEFOG_NODES_PER_MACHINE"
"""Environment variable: number of ranks per simulated machine."""
TIMELINE = "BLUEFOG_TIMELINE"
"""Environment variable: prefix of the names of the traces."""
LOG_LEVEL, HIDE_TIME = "BLUEFOG_LOG_LEVEL", "BLUEFOG_LOG_HIDE_TIME"
FUSION = "BLUEFOG_FUSION_THRESHOLD"
_LEVELS = {"trace": "DEBUG", "fatal": "CRITICAL"}
_LEVELS |= {name.lower(): name for name in ("DEBUG", "INFO", "WARNING", "ERROR")}
_NEEDLESS = {
    "CYCLE_TIME|SLEEP_USEC_FOR_WIN_PASSIVE|NUM_FINALIZER_THREADS": "there is no polling thread",
    "MPI_THREAD_LEVEL|MAX_WIN_SENT_LENGTH": "windows do not use MPI",
    "[A-Z_]+_BY_MPI|OPS_ON_CPU|WIN_ON_GPU|USE_UCX": "bf.init(backend=...) decides what is used",
    "WIN_(TIMEOUT_S|WARN_AFTER_S|RESTART_RETRIES|DISABLE_RESTART)": "bf.init(timeout_s=...) does",
}
"""Names of BlueFog's variables without `BLUEFOG_`, and why they have no effect here."""


def bucket_mb() -> float:
    """Returns the size of buckets in MB: BLUEFOG_FUSION_THRESHOLD (bytes), else the default.

    Raises:
        UserError: the variable's value is not a whole number.
    """
    text = os.environ.get(FUSION)
    if not text:
        return BUCKET_MB
    if not text.isdecimal():
        raise UserError(f"{FUSION}={text}: must be a whole number of bytes")
    return max(1, int(text)) / MIB


def read() -> None:
    """Sets the log as BlueFog's variables say, and logs which of its variables have no effect.

    Raises:
        UserError: the log level is none of BlueFog's.
    """
    if level := os.environ.get(LOG_LEVEL):
        log.setLevel(one_of(LOG_LEVEL, level.lower(), _LEVELS))
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())
            when = "" if os.environ.get(HIDE_TIME, "0") not in ("0", "") else "%(asctime)s "
            log.handlers[0].setFormatter(logging.Formatter(f"{when}%(levelname)s: %(message)s"))
    for name in sorted(os.environ):
        for pattern, reason in _NEEDLESS.items():
            if re.fullmatch(f"BLUEFOG_({pattern})", name):
                log.warning("%s=%s has no effect: %s", name, os.environ[name], reason)
