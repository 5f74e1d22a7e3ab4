"""Reports a run to the user: console, metrics.csv, predictions.csv, figures and reports."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
