"""Patches the frameworks: CPU, missing packages, safe reading of checkpoints, signals, files."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
