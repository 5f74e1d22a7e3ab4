"""Options, checks, processes and run directories of a job, imported without torch."""

from megakit.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
