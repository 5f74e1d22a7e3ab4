"""Simulates GPUs on a machine without a GPU; see `rehearse` for what is checked."""

from megakit.testing.rehearsal.rehearse import rehearse_gpu as rehearse_gpu
from megakit.testing.rehearsal.rehearse import rehearsed_environment as rehearsed_environment
