from .context import read_model_settings as read_model_settings
from .manifest import Manifest as Manifest
from .manifest import read_manifest as read_manifest
from .manifest import verify as verify
from .writer import CheckpointWriter as CheckpointWriter
