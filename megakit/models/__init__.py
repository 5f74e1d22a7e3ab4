"""Provides model configs, layers, and the loading of models and weights from checkpoints."""

from megakit.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
