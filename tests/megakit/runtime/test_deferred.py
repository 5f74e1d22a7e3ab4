"""What torchmetrics imports and nobody uses comes when it is used."""

import pytest

from tests.scripts import output_of

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
from torchmetrics.utilities.plot import trim_axs

mean = MeanMetric()
mean.update(torch.tensor(1.0))
figure, axes = mean.plot()
import matplotlib.pyplot
print(type(figure) is matplotlib.pyplot.Figure)
print(mean.plot(torch.tensor(2.0), ax=axes)[1] is axes, trim_axs(axes, 1) is axes)
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


@pytest.mark.long
def test_importing_torchmetrics_leaves_the_rest_for_later() -> None:
    assert output_of(PROGRAM).splitlines() == ["[1, 3, 2]", "True", "ResNet", "True", "True True"]
