"""Options, checks, processes and run directories of a job, imported without torch."""

import sys

try:
    import lazy_loader as lazy
except ModuleNotFoundError:
    print(
        f"{sys.argv[0]}: the packages are missing in this Python, {sys.executable}. "
        "./run pretrain, or any ./run VERB, uses one that has them: .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(2)

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
