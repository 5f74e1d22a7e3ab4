"""Simulates GPUs on a machine without a GPU: CPU tensors with labels that name a GPU.

Every operation of torch is checked; one that would fail on a GPU raises an error. CUDA graphs are
captured and replayed. A report tells which process opens which GPU, how often the host waits for
it, and how many kernels, graphs and copies it launches.

A rehearsal does not detect races between streams, and does not simulate the thread of a GPU's
backward pass, `autocast("cuda")`, TF32, the rounding of GPU kernels, Triton, memory in use, time,
drivers, failures of NCCL, or what NCCL and cuBLAS must have allocated before a graph is captured.
torch's C++ code regards every tensor as a CPU tensor. During a backward pass, the rehearsal
therefore treats `device="cpu"` as the GPU, and cannot detect a tensor that a backward function
wrongly creates on the CPU.
"""
