"""ONNX Runtime's own operator for one query over a cache, as a peer that the benchmark of kernels can time.

`GroupQueryAttention` appends a key and a value to the cache and attends to all of it. So the cache that a case has is
taken apart: its last row is the new token's. Past and present are one buffer, as deployments of that operator have it:
apart, every call would copy the whole cache. What it computes is then what `models.regions.decode` does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

DOMAIN = "com.microsoft"
NEW, PAST, PRESENT = ("new_key", "new_value"), ("past_key", "past_value"), ("present_key", "present_value")
LARGEST_ERROR = 1e-4
Feeds = dict[str, np.ndarray[Any, Any]]


def grouped_query_attention(*, heads: int, kv_heads: int, size: int) -> onnx.ModelProto:
    """query f32 [batch, 1, heads · size], key and value of the new token, caches [batch, kv_heads, keys, size] → y."""
    cache = ("batch", kv_heads, "keys", size)
    inputs = [helper.make_tensor_value_info("query", TensorProto.FLOAT, ("batch", 1, heads * size))]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("batch", 1, kv_heads * size)) for n in NEW]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, cache) for n in PAST]
    inputs.append(helper.make_tensor_value_info("last", TensorProto.INT32, ("batch",)))
    inputs.append(helper.make_tensor_value_info("total", TensorProto.INT32, ()))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 1, heads * size))]
    outputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, cache) for n in PRESENT]
    names = [one.name for one in inputs]
    made = [one.name for one in outputs]
    node = helper.make_node("GroupQueryAttention", names, made, domain=DOMAIN, num_heads=heads, kv_num_heads=kv_heads)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "decode", inputs, outputs), opset_imports=opsets, ir_version=8)


def bind_cache(session: ort.InferenceSession, feeds: Feeds) -> Callable[[], object]:
    """What runs the peer on a case's q, k and v, past and present bound to one buffer each.

    Raises ValueError if its result is not the attention of q over all of k and v.
    """
    q, caches = feeds["q"], (feeds["k"], feeds["v"])
    batch, _, keys, _ = caches[0].shape
    values = {"query": q.reshape(batch, 1, -1), "last": np.full(batch, keys - 1, np.int32), "total": np.int32(keys)}
    values |= {name: cache[:, :, -1:].reshape(batch, 1, -1) for name, cache in zip(NEW, caches, strict=True)}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)))
    binding.bind_output("y")
    for past, present, cache in zip(PAST, PRESENT, caches, strict=True):
        buffer = ort.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(past, buffer)
        binding.bind_ortvalue_output(present, buffer)
    session.run_with_iobinding(binding)
    got = binding.get_outputs()[0].numpy().reshape(q.shape)
    largest = float(np.abs(got - attention(q, *caches)).max())
    if not largest < LARGEST_ERROR:
        raise ValueError(f"GroupQueryAttention differs by {largest:.2g} from attention over the whole cache")
    return lambda: session.run_with_iobinding(binding)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q · kᵀ / √size) · v of heads that share those of k and v."""
    batch, heads, _, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, size)
    scores = grouped @ k.swapaxes(2, 3) / np.sqrt(np.float32(size))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).reshape(batch, heads, 1, size)
