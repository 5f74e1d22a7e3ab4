from .console import Console as Console
from .files import write_atomically as write_atomically
from .metrics import MetricsFile as MetricsFile
from .predictions import write_predictions as write_predictions
from .results import Results as Results
