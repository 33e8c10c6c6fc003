"""One operation a file: its definition in plain PyTorch, faster forms, and the function to call.

Triton's kernels are compiled for GPUs (tests/test_ahead_of_time.py) and run in its interpreter;
none of them has run on a GPU.
"""
