from ..nemo.writer import CheckpointWriter as CheckpointWriter
from .manifest import Manifest as Manifest, read_manifest as read_manifest, verify as verify
from .model_settings import read_model_settings as read_model_settings
