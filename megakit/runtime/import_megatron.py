"""Imports Megatron-Core in a program that has not called `use_accelerator` yet.

Import this module before Megatron. Megatron's inference engine compiles a CUDA helper when it is
imported. On a machine with a CUDA compiler and without a GPU, the compilation ends in an
IndexError. The engine is not used here, so a stand-in replaces its helper, as in `use_accelerator`.
"""

from megakit.runtime.optional_packages import replace_unified_memory

replace_unified_memory()

import megatron.core  # noqa: E402, F401
