"""Lets the ranks run the experiments of docs/concepts.md."""

from collections.abc import Iterator

import cloudpickle  # type: ignore[import-untyped]
import pytest

from tests.docs import fitting


@pytest.fixture(scope="session", autouse=True)
def fitting_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(fitting)  # ranks cannot import it
    yield
    cloudpickle.unregister_pickle_by_value(fitting)
