"""What users touch: the path as one call, sessions in ONNX Runtime, verification, timing, serving, the command line."""
