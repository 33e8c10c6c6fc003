"""One operation per file: its definition in plain PyTorch, faster forms, and the function to call.

The Triton kernels pass their tests on an H200 and in Triton's interpreter; for other GPUs they have
been compiled (tests/test_ahead_of_time.py).
"""
