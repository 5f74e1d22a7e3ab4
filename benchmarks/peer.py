"""One training by one of the peers, in this process; prints its figures as a line of JSON.

python benchmarks/peer.py {ours,lightning,torch} [--steps N] [...]
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.job import Clock, Job

MODULES = {
    "ours": "peers.ours",
    "lightning": "peers.plain_lightning",
    "torch": "peers.plain_torch",
}


def main() -> None:
    from megakit.job.command_line import parse_options

    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in MODULES:
        sys.exit(__doc__)
    job = parse_options(Job)
    importlib.import_module(MODULES[name]).train(job, Clock(job))


if __name__ == "__main__":
    main()
