"""From the command line to the exit status, without torch: options, plan, run, processes."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
