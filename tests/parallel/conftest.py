"""One pool of rank processes for all tests here: it imports the frameworks once."""

from collections.abc import Iterator

import pytest

from megakit.testing import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool
