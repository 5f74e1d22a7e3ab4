from .console import Console as Console
from .files import write_atomically as write_atomically
from .metrics import MetricsFile as MetricsFile
from .predictions import write_rows as write_rows
from .results import Results as Results
