"""`model_components`, which can be imported once an accelerator was chosen."""

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def components(megatron: None) -> ModuleType:
    import model_components

    return model_components
