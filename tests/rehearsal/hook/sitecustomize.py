"""Rehearses GPUs in every Python process that has this folder on PYTHONPATH and REHEARSE_GPUS set.

    PYTHONPATH=tests/rehearsal/hook REHEARSE_GPUS=2 python model_pretrain.py --accelerator gpu

Python imports a module of this name before anything else. The rehearsal begins when torch is
imported, because commands such as `--help` do not import torch. With REHEARSE_GRAPH set, a step is
a CUDA graph. ROUND_RATE without REHEARSE_GPUS makes a CPU's results those of a rehearsed GPU.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def begin(_: Any) -> None:
    """Starts the rehearsal."""
    # The folder of tests itself: `tests` may be the name of somebody else's package.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from rehearsal.operations import begin_rehearsal  # type: ignore[import-not-found]

    sys.path.pop(0)
    begin_rehearsal(int(os.environ["REHEARSE_GPUS"]))


def find_driver(module: Any) -> None:
    """Makes a command that has not imported torch yet find a GPU's driver."""
    module._has_gpu_driver = lambda: True


def use_graph(module: Any) -> None:
    """Makes `ExactStrategy` repeat its steps as a CUDA graph, whatever the trainer says."""
    build = module.ExactStrategy.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **{**options, "cuda_graph": True})

    module.ExactStrategy.__init__ = init


def round_rate(module: Any) -> None:
    """Makes a CPU compute with the learning rate in float32, as a GPU does."""
    import numpy as np

    count = module.FusedAdam.count

    def count_rounded(self: Any) -> None:
        for group in self.param_groups:
            group["lr"] = float(np.float32(group["lr"]))
        count(self)

    module.FusedAdam.count = count_rounded


# A Python without torch, such as the system's in a shell script, has nothing to rehearse.
if "REHEARSE_GPUS" in os.environ and find_spec("torch") is not None:
    from wrapt import register_post_import_hook

    register_post_import_hook(find_driver, "megakit.runtime.accelerator")
    register_post_import_hook(begin, "torch")
    if "REHEARSE_GRAPH" in os.environ:
        register_post_import_hook(use_graph, "megakit.nemo.strategy")
if "ROUND_RATE" in os.environ:
    from wrapt import register_post_import_hook

    register_post_import_hook(round_rate, "megakit.runtime.fused_adam")
