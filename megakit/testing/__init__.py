"""Provides checks for your own datasets and models.

The package loads a name when the name is first used. The stub `__init__.pyi` lists the names.
"""

from megakit.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
