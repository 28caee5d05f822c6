"""ONNX graphs in, regions and their specs out, and back: the fused model. Knows ONNX, and no machine."""
