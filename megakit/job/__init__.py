"""Options, checks, processes and run directories of a job, imported without torch."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
