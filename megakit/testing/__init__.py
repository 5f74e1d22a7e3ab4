"""Provides checks for your own datasets and models.

The package loads a name when the name is first used. The stub `__init__.pyi` lists the names.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
