"""Where the machine shows through: GPU or CPU, absent parts of NeMo, signals, quiet frameworks."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
