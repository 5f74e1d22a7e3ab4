"""Trainable model configs, their settings in checkpoints, and loading part of a checkpoint."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
