"""Begins a rehearsal in this process, until its end."""

import os
import threading
from typing import Any, NoReturn

from wrapt import register_post_import_hook

from megakit.runtime.patching import require_attribute
from tests.rehearsal.cuda import install_cuda
from tests.rehearsal.machine import Machine, replace
from tests.rehearsal.operations import RehearsalMode
from tests.rehearsal.tensors import install_tensors


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
    register_post_import_hook(
        lambda module: vars(module).update(_has_gpu_driver=lambda: True),
        "megakit.runtime.accelerator",
    )
    # A dispatch mode belongs to one thread.
    start: Any = require_attribute(threading.Thread, "_bootstrap_inner")

    def start_in_mode(self: threading.Thread) -> None:
        with RehearsalMode(machine):
            start(self)

    replace(threading.Thread, _bootstrap_inner=start_in_mode)
    RehearsalMode(machine).__enter__()
