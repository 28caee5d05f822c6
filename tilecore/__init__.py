"""The tile compiler: a spec in, C text and a shared library out. Knows machines, and no ONNX."""
