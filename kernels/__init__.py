"""One operation per file: its definition in plain PyTorch, faster forms, and the function to call.

The Triton kernels have been compiled for GPUs (tests/test_ahead_of_time.py) and have run in
Triton's interpreter. None of them has run on a GPU.
"""
