"""Rehearses GPUs in every Python process that has this folder on PYTHONPATH and REHEARSE_GPUS set.

    PYTHONPATH=tests/rehearsal/hook REHEARSE_GPUS=2 python model_pretrain.py --accelerator gpu

Python imports a module of this name before anything else. The rehearsal begins when torch is
imported, because commands such as `--help` do not import torch.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def begin(_: Any) -> None:
    """Starts the rehearsal."""
    sys.path.append(str(Path(__file__).resolve().parents[3]))  # the folder of `tests`
    from tests.rehearsal.begin import begin_rehearsal

    begin_rehearsal(int(os.environ["REHEARSE_GPUS"]))
    sys.path.pop()


# A Python without torch, such as the system's in a shell script, has nothing to rehearse.
if "REHEARSE_GPUS" in os.environ and find_spec("torch") is not None:
    from wrapt import register_post_import_hook

    register_post_import_hook(begin, "torch")
