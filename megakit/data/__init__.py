"""Datasets that Megatron can train on: epochs, resampling, batches, random effects.

Names are loaded when first used, so that importing one part costs only that part; the stub beside
this file lists them.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
