"""Provides datasets for training with Megatron: epochs, resampling, batches, random effects.

The package loads a name when the name is first used, so that a program imports only the modules
that it needs. The stub `__init__.pyi` lists the names.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
