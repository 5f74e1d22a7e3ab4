"""Which software a run was made with."""

import platform

import megakit

PACKAGES = ("torch", "lightning", "nemo_toolkit", "megatron-core")


def installed_versions() -> dict[str, str]:
    """The versions that checkpoints and summaries record, by package name.

    Unknown where a package was built from source without metadata, as some containers have it.
    """
    from importlib.metadata import PackageNotFoundError, version  # slow, and not for --help

    versions = {"megakit": megakit.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions
