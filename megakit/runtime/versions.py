"""Which software a run was made with."""

import platform
from importlib.metadata import PackageNotFoundError, version

import megakit

PACKAGES = ("torch", "lightning", "nemo_toolkit", "megatron-core")


def installed_versions() -> dict[str, str]:
    """The versions that checkpoints and summaries record, by package name."""
    versions = {"megakit": megakit.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except (
            PackageNotFoundError
        ):  # built from source without metadata, as some containers have it
            versions[package] = "unknown"
    return versions
