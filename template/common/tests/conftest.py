"""Defines the option --all, and the fixture that sets up Megatron in the tests' process."""

from collections.abc import Iterator

import pytest

from megakit.testing import distributed_model_parallel_state


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of `./run tests --all`."""
    parser.addoption("--all", action="store_true", help="run the tests marked long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the tests marked long, unless --all is given."""
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: takes minutes, give --all"))


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Sets up Megatron for one process; only afterwards may tests import `model_components`."""
    with distributed_model_parallel_state(accelerator="cpu"):
        yield
