"""What the library's tests share."""

from collections.abc import Iterator

import pytest

from tests.single_process import single_process


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Megatron set up on a CPU; until this has run, tests must not import NeMo or Megatron."""
    with single_process():
        yield
