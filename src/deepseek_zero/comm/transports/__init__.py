"""One transport per file: what carries flat tensors between ranks."""
