"""The versions that checkpoints and summaries record."""

import platform
from importlib.metadata import version

import megakit
from megakit.runtime import versions


def test_all_that_results_depend_on() -> None:
    assert versions.installed_versions() == {
        "megakit": megakit.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "nemo_toolkit")},
        "megatron-core": version("megatron-core"),
    }
