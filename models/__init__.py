"""Builders of test and benchmark models: seeded random weights, onnx alone, nothing stored in git."""
