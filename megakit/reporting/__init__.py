"""What a person sees and keeps of a run: console, metrics.csv, summary.json, predictions.csv."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
