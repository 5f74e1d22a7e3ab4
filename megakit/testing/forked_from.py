"""Imports the frameworks for a CPU: the process that `ranks.py` forks ranks from imports this."""

import os

from megakit.runtime.accelerator import use_accelerator
from megakit.runtime.deferred_imports import resume_collector, suspend_collector

for stream in (1, 2):  # what the frameworks say during their import; each rank has a log
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
suspend_collector()
use_accelerator("cpu")
import megakit.nemo.fit  # noqa: E402, F401  # NeMo, which most jobs need

resume_collector()
