"""One operation a file: its definition in plain PyTorch, faster forms, and the function to call."""
