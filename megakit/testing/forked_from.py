"""Imports the frameworks for a CPU: the process that `ranks.py` forks ranks from imports this."""

import os
import sys

from megakit.runtime.accelerator import use_accelerator
from megakit.runtime.deferred_imports import resume_collector, suspend_collector

for stream in (1, 2):  # what the frameworks say during their import; each rank has a log
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
suspend_collector()
use_accelerator("cpu")
if sys.modules.get("nemo"):
    import megakit.nemo.fit  # noqa: F401  # which most jobs need

resume_collector()
