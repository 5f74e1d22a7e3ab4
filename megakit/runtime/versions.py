"""Lists the versions of the software that a run uses."""

import platform

import megakit

PACKAGES = ("torch", "lightning", "nemo_toolkit", "megatron-core")


def installed_versions() -> dict[str, str]:
    """Returns the versions that checkpoints and summaries record, by package name.

    A package that was built from source, as in some containers, may have no metadata: "unknown".
    """
    from importlib.metadata import PackageNotFoundError, version  # slow, and --help needs neither

    versions = {"megakit": megakit.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions
