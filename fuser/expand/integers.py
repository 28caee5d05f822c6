"""Definition of com.microsoft DynamicQuantizeMatMul, as ONNX Runtime's CPU kernel computes it.

The range of the whole left operand gives one scale and zero point; levels are multiplied as integers. Source: the
operator's schema text, checked against the kernel.
"""

import onnx_ir as ir

from fuser.expand.writer import Form, FormError


def dynamic_quantize_mat_mul(form: Form, key: str) -> ir.Function:
    """A, B, the scale and the zero point of B (one number, or one per column), bias."""
    if form.opset < 11:
        raise FormError(f"its levels need DynamicQuantizeLinear of opset 11; the model has opset {form.opset}")
    levels, scale, zero = form.ops("DynamicQuantizeLinear", [form.input(0)], 3)
    right_zero = form.vector_or_number(3) if form.has(3) else None
    total = form.op("MatMulInteger", levels, form.input(1), zero, right_zero)
    real = form.op("Mul", form.op("Mul", form.cast(total, ir.DataType.FLOAT), scale), form.vector_or_number(2))
    return form.function(key, [form.op("Add", real, form.input(4)) if form.has(4) else real])
