"""Each rule with a dataset that breaks just that one, and ones that keep it."""

import contextlib
import importlib.util
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from megakit.data import (
    BlendedDataset,
    EpochIndex,
    MultiEpochDatasetResampler,
    PRNGResampleDataset,
)
from megakit.testing import (
    DatasetDistributedNondeterministic,
    DatasetLocallyNondeterministic,
    assert_dataset_compatible_with_megatron,
    assert_dataset_elements_not_equal,
)
from megakit.testing.__main__ import main
from tests.scripts import REPOSITORY, environment

# By a name that other processes can import, too.
FOLDER = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def _importable():
    sys.path.insert(0, FOLDER)
    yield
    sys.path.remove(FOLDER)


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(
        "broken_datasets", Path(FOLDER, "broken_datasets.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["broken_datasets"] = module
    spec.loader.exec_module(module)
    return module


broken: Any = _load()
Good: Any = broken.Good

GOOD = {
    name: getattr(broken, name)
    for name in ("Seeded", "PlainBatches", "Epochs", "ReadOnlyWindows", "Columns")
}
GOOD |= {
    "too long to be read": lambda: range(10**12),
    "tensors": lambda: TensorDataset(torch.rand(7, 3), torch.arange(7)),
    "one sample": lambda: broken.Good(1),
    "split": lambda: random_split(broken.PlainBatches(), [7, 3])[0],
    "resampled": lambda: MultiEpochDatasetResampler(broken.Epochs(), num_samples=25),
    "blended": lambda: BlendedDataset([(broken.Epochs(), 1), (broken.Epochs(), 1)], num_samples=99),
    "drawn": lambda: PRNGResampleDataset(TensorDataset(torch.rand(4, 3)), num_samples=30),
}

# The dataset, the start of the message, the path inside the sample, the remedy.
BROKEN = {
    "TorchGlobal": (r"dataset\[0\] draws from or changes .* torch\.", "sample_generator"),
    "NumpyGlobal": (r"dataset\[0\] draws from or changes .* numpy\.", "sample_generator"),
    "PythonGlobal": (r"dataset\[0\] draws from or changes .* random\.", "sample_generator"),
    "UselessDraw": (r"dataset\[0\] draws from or changes .* torch\.", "sample_generator"),
    "ManualSeed": (r"dataset\[0\] calls torch\.manual_seed", "sample_generator"),
    "ForkedManualSeed": (r"dataset\[0\] calls torch\.manual_seed", "sample_generator"),
    "NumpySeed": (r"dataset\[0\] calls numpy\.random\.seed", "sample_generator"),
    "ForkedDraw": (r"dataset\[0\] depends on the state .*sample\['x'\]\[0, 0\]", "sample_gen"),
    "Unseeded": (r"dataset\[0\] differs .*sample\['x'\]\['deep'\]\[1\]\[1\]\[0\]", "sample_gen"),
    "Clock": (r"dataset\[0\] differs when read again: sample\['x'\] is", "the time"),
    "OneGenerator": (r"dataset\[0\] differs when read again: sample\['x'\]\[0\]", "goes on"),
    "UnseededEpochs": (r"EpochIndex\(epoch=0, idx=0\)\] .*\['noise'\]\[0\]", "sample_generator"),
    "Remembers": (r"dataset\[5\] depends on what was read before it: sample\['x'\]\[1\]", "order"),
    "OneBuffer": (r"dataset\[0\] changes .*: sample\['x'\]\[0\] is 0.0 and 9.0", "clone"),
    "TooLong": (r"len\(dataset\) is 10, but dataset\[9\] fails with IndexError", "exact"),
    "Grows": (r"len\(dataset\) was 10, and 11", "fix it"),
    "OtherItems": (r"dataset\[0\] .*__getitems__ differ: sample\['x'\]\[0, 0\]", "one function"),
    "FewItems": (r"__getitems__ gives 4 samples for 5 indices", "one sample for each"),
    "OtherBatch": (r"get_batch differ: batch\['x'\]\[4, 0, 0\] is 9.0 and 10.0", "one function"),
    "OtherBatchType": (r"batch\['idx'\] has the dtype torch.int64 and torch.int32", "int64"),
}

# The dataset, the warning, its remedy.
UNUSUAL = {
    "Windows": (r"dataset\[0\] and dataset\[1\] share memory, at sample\['x'\]", "read-only"),
    "SharedMask": (r"share memory, at sample\['x'\]\[0\] and sample\['x'\]\[0\]", "clone"),
    "Endless": (r"len\(dataset\) is 10, and dataset\[10\] gives a sample", "IndexError"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", GOOD)
def test_datasets_that_keep_the_rules(name):
    assert_dataset_compatible_with_megatron(GOOD[name]())


@pytest.mark.parametrize("name", UNUSUAL)
def test_datasets_that_are_unusual(name):
    message, remedy = UNUSUAL[name]
    with pytest.warns(UserWarning, match=message) as caught:
        assert_dataset_compatible_with_megatron(getattr(broken, name)())
    (warning,) = caught
    assert remedy in str(warning.message)
    assert warning.filename == __file__


def test_the_other_kind_of_index():
    with pytest.raises(AssertionError, match=r"give index=0 or index=EpochIndex\(0, 0\)"):
        assert_dataset_compatible_with_megatron(broken.Epochs(), 0)
    with pytest.raises(AssertionError, match=r"TypeError.*index=0"):
        assert_dataset_compatible_with_megatron([1, 2], EpochIndex(0, 0))


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (
            ("TorchGlobal", "Unseeded", "Remembers", "UnseededEpochs"),
            DatasetLocallyNondeterministic,
        ),
        (
            ("ManualSeed", "UselessDraw", "ForkedDraw"),
            DatasetDistributedNondeterministic,
        ),
    ],
    ids=["locally", "distributed"],
)
def test_kinds_of_nondeterminism(names, error):
    for name in names:
        with pytest.raises(error):
            assert_dataset_compatible_with_megatron(getattr(broken, name)())


@pytest.mark.parametrize("name", BROKEN)
def test_datasets_that_break_one(name):
    message, remedy = BROKEN[name]
    with pytest.raises(AssertionError, match=message) as caught:
        assert_dataset_compatible_with_megatron(getattr(broken, name)())
    assert remedy in str(caught.value)


def test_an_empty_dataset():
    with pytest.raises(AssertionError, match="dataset is empty"):
        assert_dataset_compatible_with_megatron([])


def test_the_given_index_is_read():
    class Unlucky(Good):
        def values(self, index):
            return np.random.default_rng(None if index == 7 else index).random()

    assert_dataset_compatible_with_megatron(Unlucky())
    with pytest.raises(AssertionError, match=r"dataset\[7\] differs when read again"):
        assert_dataset_compatible_with_megatron(Unlucky(), 7)
    assert_dataset_compatible_with_megatron(broken.Epochs(), EpochIndex(3, 7))


def test_a_comparison_of_ones_own():
    def only_shapes(a, b):
        assert a["x"].shape == b["x"].shape, "shapes differ"

    class Noisy(Good):
        def values(self, index):
            return torch.from_numpy(np.random.default_rng().random((2, 3)))

    assert_dataset_compatible_with_megatron(Noisy(), 0, only_shapes)


def test_global_generators_are_left_as_they_were():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    for dataset in (broken.Good(), broken.NumpySeed()):
        with contextlib.suppress(AssertionError):
            assert_dataset_compatible_with_megatron(dataset)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_elements_not_equal():
    assert_dataset_elements_not_equal(broken.Good())
    assert_dataset_elements_not_equal(broken.Epochs(), EpochIndex(0, 3), EpochIndex(1, 3))
    with pytest.raises(AssertionError, match=r"idx=3\)\] are equal, though they should differ"):
        assert_dataset_elements_not_equal(broken.SameEpochs(), EpochIndex(0, 3), EpochIndex(1, 3))
    with pytest.raises(AssertionError, match="differs when read again"):
        assert_dataset_elements_not_equal(broken.Unseeded())


def test_workers():
    assert_dataset_compatible_with_megatron(broken.WorkerNumber())  # not seen in one process
    with pytest.raises(AssertionError, match=r"workers"):
        assert_dataset_compatible_with_megatron(broken.WorkerNumber(), other_processes=True)


@pytest.mark.long
def test_other_processes_with_good_datasets():
    dataset = MultiEpochDatasetResampler(broken.Epochs(), num_samples=25)
    assert_dataset_compatible_with_megatron(dataset, other_processes=True)


def test_a_dataset_that_cannot_be_sent():
    dataset = broken.Good()
    dataset.lock = threading.Lock()
    with pytest.raises(AssertionError, match=r"cannot be sent to another process.*factory"):
        assert_dataset_compatible_with_megatron(dataset, other_processes=True)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["broken_datasets:HashSeed", "--quick"], 0, "keeps the rules (10 samples)"),
        (["broken_datasets:Endless", "--quick"], 0, "keeps the rules (10 samples)"),
        (["broken_datasets:Unseeded", "--quick"], 1, "breaks a rule: dataset[0] differs"),
        (["broken_datasets:Nowhere"], 2, "no attribute 'Nowhere'"),
        (["no_such_module_anywhere:Good"], 2, "No module named"),
    ],
)
def test_command(arguments, status, message, capsys):
    assert main(arguments) == status
    output = capsys.readouterr()
    assert message in (output.err if status else output.out)
    assert ("Endless: warning: len(dataset) is 10" in output.err) == ("Endless" in arguments[0])


@pytest.mark.long
def test_command_as_a_process():
    """As users run it: in the folder of their module."""
    result = subprocess.run(
        [sys.executable, "-m", "megakit.testing", "broken_datasets:HashSeed"],
        cwd=FOLDER,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "broken_datasets:HashSeed breaks a rule: " in result.stderr
    assert "depends on Python's hash seed" in result.stderr
    assert "Traceback" not in result.stderr
