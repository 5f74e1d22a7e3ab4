"""Checks for datasets and models of one's own.

Names are loaded when first used; the stub beside this file lists them.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
