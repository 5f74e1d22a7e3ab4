"""One training by one of the peers, in this process; prints its figures as a line of JSON.

python benchmarks/peer.py {ours,lightning,torch} [--steps N] [...]
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.job import Clock, Job

MODULES = {
    "ours": "peers.ours",
    "lightning": "peers.plain_lightning",
    "torch": "peers.plain_torch",
}


@contextlib.contextmanager
def counted() -> Iterator[Any]:
    """Rehearses a GPU; corrects two limits of the rehearsal that would falsify plain loops."""
    import torch

    from megakit.testing.rehearsal import rehearse_gpu

    class Autocast(torch.autocast):
        """Casts the tensors of a rehearsed GPU, which are in the memory of the CPU."""

        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu", *args, **kwargs)

    native: Any = torch._C
    in_groups = native._group_tensors_by_device_and_dtype

    def by_label(tensors: Any, with_indices: bool = False) -> Any:
        """Groups by the labels. By the memory, clipping would copy its factor to the host."""
        groups = in_groups(tensors, with_indices).items()
        return {(group[0][0][0].device, dtype): group for (_, dtype), group in groups}

    torch.autocast = Autocast  # type: ignore[misc]
    native._group_tensors_by_device_and_dtype = by_label
    with rehearse_gpu() as counts:
        yield counts


def main() -> None:
    from megakit.job.command_line import parse_options

    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in MODULES:
        sys.exit(__doc__)
    job = parse_options(Job)
    with counted() if job.count else contextlib.nullcontext() as counts:
        importlib.import_module(MODULES[name]).train(job, Clock(job, counts))


if __name__ == "__main__":
    main()
