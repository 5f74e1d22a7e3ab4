"""One pool of rank processes for the experiments of docs/concepts.md."""

from collections.abc import Iterator

import cloudpickle  # type: ignore[import-untyped]
import pytest

from megakit.testing import Ranks
from tests.docs import fitting


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    cloudpickle.register_pickle_by_value(fitting)  # ranks cannot import it
    with Ranks(2) as pool:
        yield pool
    cloudpickle.unregister_pickle_by_value(fitting)
