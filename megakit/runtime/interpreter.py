"""Returns the search path for processes that import what this process can import."""

import os
import sys


def search_path() -> str:
    """Returns the PYTHONPATH for a child process that imports what this process can import.

    PYTHONPATH comes first: another `sitecustomize` of this Python must not hide that of PYTHONPATH.
    """
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*inherited, *(entry or "." for entry in sys.path)])
