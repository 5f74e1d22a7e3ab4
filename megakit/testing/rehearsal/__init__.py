"""Rehearses GPUs on a machine without any; `rehearse` says what is checked and what is not."""

from megakit.testing.rehearsal.rehearse import rehearse_gpu as rehearse_gpu
from megakit.testing.rehearsal.rehearse import rehearsed_environment as rehearsed_environment
