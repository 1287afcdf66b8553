"""Makes PyTorch's FX tracing, and all that stands on it, safe to use from several threads of one process."""
