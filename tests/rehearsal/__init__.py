"""Simulates GPUs on a machine without a GPU: CPU tensors with labels that name a GPU.

In such a rehearsal, a program computes on the CPU, and every operation of torch is checked. An
operation that would fail on a GPU raises an error: tensors of two devices in one operation, a
generator of another device, `numpy()` of a GPU's tensor, a CPU tensor over NCCL, CUDA in a forked
process, a GPU that does not exist. The rehearsal counts how often the host waits for the GPU, and
records which process opens which GPU.

A rehearsal does not detect races between streams, and does not simulate the thread of a GPU's
backward pass, `autocast("cuda")`, TF32, the rounding of GPU kernels, Triton, memory in use, time,
drivers, or failures of NCCL. torch's C++ code regards every tensor as a CPU tensor. During a
backward pass, the rehearsal therefore treats `device="cpu"` as the GPU, and cannot detect a tensor
that a backward function wrongly creates on the CPU.
"""
