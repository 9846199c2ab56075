"""Native kernels for CPUs with AVX-512: built by the system's compiler on first use.

`octavo/kernels/select.py` chooses between these, oneDNN and plain torch. Next file: `build.py`.
"""
