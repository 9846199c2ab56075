"""Triton kernels for NVIDIA GPUs of compute capability 8.0 or later; tuned on 9.0 (Hopper).

Each file holds kernels and the functions that launch them; no file knows a model. They are
collected in `octavo/kernels/gpu.py`. Next file: `launch.py`.
"""
