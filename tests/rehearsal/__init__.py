"""Simulates GPUs on a machine without a GPU: CPU tensors with labels that name a GPU.

Every operation of torch is checked; one that would fail on a GPU raises an error. A report tells
how often the host waits for the GPU, and which process opens which GPU.

A rehearsal does not detect races between streams, and does not simulate the thread of a GPU's
backward pass, `autocast("cuda")`, TF32, the rounding of GPU kernels, Triton, memory in use, time,
drivers, or failures of NCCL. torch's C++ code regards every tensor as a CPU tensor. During a
backward pass, the rehearsal therefore treats `device="cpu"` as the GPU, and cannot detect a tensor
that a backward function wrongly creates on the CPU.
"""
