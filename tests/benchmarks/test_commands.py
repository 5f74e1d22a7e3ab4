"""Every benchmark that is named exists, and says what it takes; what we compare with is equal."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.refusals import CLOSED_PROXY
from tests.scripts import REPOSITORY, output_of, rehearsed, run_python

BENCHMARKS = REPOSITORY / "benchmarks"
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *BENCHMARKS.glob("*.md")]
#: Prints the help texts of scripts by name; one process is quicker than one for each.
HELP = """
import contextlib, io, json, os, runpy, sys

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
texts = {}
for name in names:
    sys.argv = [os.path.join(folder, name), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
    texts[name] = printed.getvalue()
print(json.dumps(texts))
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a benchmark by its name; they find one another by the folder they are in."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_benchmark_is_there_and_says_what_it_takes(
    benchmark: Callable[[str], ModuleType],
) -> None:
    listed = {one.arguments[0] for one in benchmark("run_all").ALL.values()}
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"benchmarks/(\w+\.py)", text)) | {"run_all.py", *listed}
    texts = json.loads(output_of(HELP, BENCHMARKS, *sorted(named)))
    for name, help_text in texts.items():
        assert help_text.startswith("usage: "), name
        assert name not in listed or "--write" in help_text, name


def test_a_folder_without_mnist_is_one_sentence(tmp_path: Path) -> None:
    """The variable names it, as for the scripts; the proxy answers no download."""
    variables = {"MNIST_DATA_DIR": "of/mine", "https_proxy": CLOSED_PROXY}
    done = run_python(BENCHMARKS / "run_all.py", "photos", cwd=tmp_path, **variables)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("benchmarks: of/mine: MNIST is not complete there, and cannot be")
    assert done.err.count("\n") == 1


@pytest.mark.long
def test_peers_compute_the_same_losses(benchmark: Callable[[str], ModuleType]) -> None:
    """In float32: so schedule, Adam, decay and clipping are what they should be."""
    steps = benchmark("steps")
    job = {"dataset": "digits", "steps": 30, "warm_up": 5, "precision": "32"}
    ours = steps.train("ours", 1, **job)["losses"]
    assert ours["30"] < 0.9 * ours["1"]
    assert steps.difference(steps.train("fused_by_hand", 1, **job)["losses"], ours) < 1e-5


@pytest.mark.long
def test_a_save_copies_no_weights(benchmark: Callable[[str], ModuleType]) -> None:
    """A model that fits into memory can be saved, and its checkpoint loaded."""
    growth = benchmark("growth")
    hidden_size = 8000
    megabytes = hidden_size * growth.PER_FEATURE * 4 / 2**20  # of the weights
    with growth.Ranks(1) as pool:
        costs = growth.checkpoint_costs(pool, hidden_size)
    assert costs["memory of a save, MB"] < megabytes / 4
    assert 2 * megabytes < costs["memory of a load, MB"] < 4 * megabytes  # Adam's moments stay
    assert 12 < costs["bytes on disk for each weight"] < 12.2


@pytest.mark.long
def test_a_gpu_gives_the_losses_of_a_cpu(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU, a thread prepares the batches, or the GPU has all images. The order is the same."""
    steps = benchmark("steps")
    job = {"dataset": "digits", "steps": 30, "warm_up": 5}  # 30 batches of 128: several epochs
    expected = steps.train("1_torch", 1, **job)["losses"]
    for name, value in rehearsed(1, tmp_path).items():
        monkeypatch.setenv(name, value)
    peers = ("1_torch", "1_torch_by_hand", "fused_graph")
    jobs = {peer: {"peer": peer, "threads": 1, "device": "gpu", **job} for peer in peers}
    for _, training in steps.in_turns(jobs, ahead=2):
        assert steps.difference(training.result()["losses"], expected) < 1e-5
    assert [*tmp_path.iterdir()]  # the report of a process that opened a GPU
