"""What torchmetrics imports and nobody uses comes when it is used."""

from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, output_of

PROGRAM = """
import sys
from megakit.runtime.deferred import import_torchmetrics

import_torchmetrics()
from importlib import import_module

metric = import_module("torchmetrics.functional.image.arniqa")
assert not {"matplotlib", "scipy.signal", "torchvision"} & set(sys.modules)

import scipy
print(scipy.signal.convolve([1, 2], [1, 1]).tolist())
import torchvision
print(type(metric.transforms.Normalize(0, 1)) is torchvision.transforms.Normalize)
print(type(metric.resnet50(weights=None)).__name__)
import torch
from torchmetrics import MeanMetric

mean = MeanMetric()
mean.update(torch.tensor(1.0))
figure, axes = mean.plot()
import matplotlib.pyplot
print(type(figure) is matplotlib.pyplot.Figure)
print(mean.plot(torch.tensor(2.0), ax=axes)[1] is axes)
"""

WITH_TRANSFORMERS = """
import importlib.util

FOUND = {name: importlib.util.find_spec(name) for name in ("torchvision", "scipy.signal")}
class AutoModel: ...
class AutoTokenizer: ...
"""

AFTER_MATPLOTLIB = """
import sys
import matplotlib.colors
from megakit.runtime.deferred import import_torchmetrics

import_torchmetrics()
print(matplotlib.axes.__name__, matplotlib.pyplot.__name__, "torchvision" in sys.modules)
"""


def test_a_package_that_is_imported_already_is_not_replaced() -> None:
    """torchmetrics reads `matplotlib.axes` as an attribute of the package."""
    assert output_of(AFTER_MATPLOTLIB) == "matplotlib.axes matplotlib.pyplot False\n"


def test_transformers_may_ask_which_packages_are_there(tmp_path: Path) -> None:
    """As a real transformers does, which torchmetrics imports where a recent one is installed."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(WITH_TRANSFORMERS)
    metadata = tmp_path / "transformers-5.17.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0")
    told = output_of(
        "from megakit.runtime.deferred import import_torchmetrics; import_torchmetrics()\n"
        "import sys; found = sys.modules['transformers'].FOUND\n"
        "print({name: spec.name for name, spec in found.items()})\n"
        "from importlib import import_module\n"
        "user = import_module('torchmetrics.functional.image.arniqa')\n"
        "print(type(user.transforms.Normalize(0, 1)).__module__)",  # the real one, now
        PYTHONPATH=f"{REPOSITORY}:{tmp_path}",
    )
    found, real = told.splitlines()
    assert found == "{'torchvision': 'torchvision', 'scipy.signal': 'scipy.signal'}"
    assert real.startswith("torchvision.")


@pytest.mark.long
def test_importing_torchmetrics_leaves_the_rest_for_later() -> None:
    assert output_of(PROGRAM).splitlines() == ["[1, 3, 2]", "True", "ResNet", "True", "True"]
