"""Begins a rehearsal in this process, until its end."""

import os
import threading
from typing import Any, NoReturn

from megakit.runtime.patching import require_attribute

from .cuda import install_cuda
from .machine import Machine, replace
from .operations import RehearsalMode
from .tensors import install_tensors


def begin_rehearsal(number: int) -> None:
    """Simulates a machine with a number of GPUs; torch has been imported just now."""
    machine = Machine(number)
    install_tensors(machine)
    install_cuda(machine)
    leave = os._exit  # with which the scripts end

    def write_and_leave(status: int) -> NoReturn:
        machine.write()
        leave(status)

    os._exit = write_and_leave
    # A dispatch mode belongs to one thread.
    start: Any = require_attribute(threading.Thread, "_bootstrap_inner")

    def start_in_mode(self: threading.Thread) -> None:
        with RehearsalMode(machine):
            start(self)

    replace(threading.Thread, _bootstrap_inner=start_in_mode)
    RehearsalMode(machine).__enter__()
