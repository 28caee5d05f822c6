# ruff: noqa: ANN001, ANN003, ANN201
# pyright: basic, reportMissingImports=false
"""CuTe DSL's side of the comparison, through the libraries that its users call: quack and FlashAttention 4.

Each function is for one case: arrays by name come in, the result goes out, as a new array where the library makes one.
Kernels are compiled when they are first called; both libraries keep them on disk if their variables say so.
"""

import importlib.util
import os

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # before the import, which reads it

HAS_QUACK = importlib.util.find_spec("quack") is not None
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
if HAS_QUACK:
    from quack.gemm_interface import gemm
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight
    from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd
    from quack.softmax import softmax_fwd
if HAS_FLASH:
    from flash_attn.cute.interface import flash_attn_func


def product(a):
    """y = x · wᵀ."""
    return gemm(a["x"], a["w"].T, out=a["y"], tuned=False)


def levels(a, group):
    """The product by int4 weights, repacked on the first call."""
    if "packed" not in a:
        columns, groups = a["scale"].shape
        zero = a["zero"]
        zeros = (zero[..., None] >> zero.new_tensor([0, 4])).reshape(columns, groups) & 15
        a["packed"] = prepare_w4_weight(a["levels"].reshape(columns, -1), (a["scale"], zeros), "int4awq")
    weights, strip = a["packed"]
    return gemm_w4a16(a["x"], weights, strip, out=a["y"], wformat="int4awq")


def rmsnorm(a):
    return rmsnorm_fwd(a["x"], a["weight"], eps=1e-5)[0]


def layernorm(a):
    if "weight32" not in a:
        a["weight32"], a["bias32"] = a["weight"].float(), a["bias"].float()
    return layernorm_fwd(a["x"], a["weight32"], a["bias32"], eps=1e-5)


def softmax(a):
    return softmax_fwd(a["x"])


def attention(a, **options):
    """FlashAttention 4 over [B, H, S, D], which it sees as [B, S, H, D]."""
    q, k, v = (a[name].transpose(1, 2) for name in "qkv")
    found = flash_attn_func(q, k, v, **options)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)
