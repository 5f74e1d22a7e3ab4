"""What all tests share: the marked ones that need time or a GPU, and where MNIST is."""

from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: takes minutes, give --all"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(f"gpu: {reason}")


@cache
def why_no_gpu() -> str | None:
    """Asked when the first test marked `gpu` is about to run, as torch takes seconds to import."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU that it can use"
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        return f"CUDA does not work here ({str(error).splitlines()[0]})"
    return None


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """A root with the real MNIST files, to be read only."""
    root = REPOSITORY.parent / "shared" / "data"
    if not (root / "MNIST" / "raw").is_dir():
        pytest.skip("no MNIST in ../shared/data beside the repository")
    return root
