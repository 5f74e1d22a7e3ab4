"""What NeMo the Python that runs this has, and a way to use it from another environment.

`python -I lender.py` prints the versions; before them "fits: ", if this project can use them.
`python -I lender.py FOLDER` lets the environment with that site-packages folder see this Python's
packages after its own, and prints their names, one in a line. uv can do neither: in a virtual
environment it sees no inherited packages. Python 3.8 can run this, and does not fit.
"""

import platform
import site
import sys
from importlib.metadata import distributions
from pathlib import Path

NEEDED = {"nemo-toolkit": "2.7.", "megatron-core": "0.15.", "torchvision": ""}


def packages() -> "dict[str, str]":
    """Returns the version of each package that this Python imports."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        versions.setdefault(name, distribution.version or "")
    return versions


def lend(folder: str) -> None:
    """Lets the environment of a site-packages folder see this Python's packages."""
    # Not by --system-site-packages: that reaches past a virtual environment to its base.
    lines = [f"site.addsitedir({path!r})" for path in site.getsitepackages()]
    Path(folder, "borrowed.pth").write_text("; ".join(["import site", *lines]) + "\n")


def main() -> None:
    """Prints what the command line asks for."""
    held = packages()
    if sys.argv[1:]:
        lend(sys.argv[1])
        # Not megakit: it may be another version, and a project that needs it carries its wheel.
        print(*sorted(held.keys() - {"", "megakit"}), sep="\n")
        return
    fits = (3, 11) <= sys.version_info < (3, 14)
    fits = fits and all(held.get(name, "-").startswith(NEEDED[name]) for name in NEEDED)
    found = " ".join(f"{name} {held[name]}" for name in NEEDED if name in held)
    print("fits: " * fits + "Python", platform.python_version(), "with " * bool(found) + found)


if __name__ == "__main__":
    main()
