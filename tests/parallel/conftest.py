from collections.abc import Iterator

import pytest

from megakit.testing import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Enough for tensor x pipeline x data; as quick as four."""
    with Ranks(8, timeout=300) as pool:
        yield pool
