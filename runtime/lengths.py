"""Inputs that count or place entries of a sequence: what they may hold follows from what else their operator reads.

In: the node that reads such an input, and the shapes of the node's other inputs. Out: the least and the largest value
that the operator takes. The invariant: any values in between are valid together.
"""

from collections.abc import Callable, Mapping, Sequence

import onnx

Shape = tuple[int, ...]
ShapeOf = Callable[[int], Shape | None]  # of the node's input at a position; None when it is missing or not known
Range = tuple[int, int]


def length_range(node: onnx.NodeProto, name: str, shapes: Mapping[str, Shape]) -> Range | None:
    """What the input `name` of `node` may hold; None when it is no length, or the shapes do not say."""

    def shape_of(position: int) -> Shape | None:
        return shapes.get(node.input[position]) if position < len(node.input) else None

    for position, value in enumerate(node.input):
        rule = _RULES.get((node.op_type, position))
        if value == name and rule is not None:
            return rule(shape_of, _given(node.input))
    return None


def _given(inputs: Sequence[str]) -> frozenset[int]:
    return frozenset(position for position, value in enumerate(inputs) if value)


def _total(shape_of: ShapeOf, given: frozenset[int]) -> Range | None:
    """GroupQueryAttention's total_sequence_length: entries of the cache and new ones."""
    query, past = shape_of(0), shape_of(3)
    if query is None or (3 in given and past is None):
        return None
    total = query[1] + (past[2] if past else 0)
    return total, total


def _last_keys(shape_of: ShapeOf, given: frozenset[int]) -> Range | None:
    """Its seqlens_k, the place of each row's last key: a cache may be filled in part."""
    query, total = shape_of(0), _total(shape_of, given)
    if query is None or total is None:
        return None
    return (query[1] if 3 in given else total[1]) - 1, total[1] - 1


def _valid_keys(shape_of: ShapeOf, _: frozenset[int]) -> Range | None:
    """Attention's nonpad_kv_seqlen: keys that count."""
    keys = shape_of(1)
    return None if keys is None else (min(1, keys[-2]), keys[-2])


def _first_entries(shape_of: ShapeOf, _: frozenset[int]) -> Range | None:
    """TensorScatter's write_indices: where the new entries begin in the cache, along the last axis but one."""
    cache, update = shape_of(0), shape_of(1)
    if cache is None or update is None or len(cache) < 2:
        return None
    return 0, max(0, cache[-2] - update[-2])


_RULES: Mapping[tuple[str, int], Callable[[ShapeOf, frozenset[int]], Range | None]] = {
    ("GroupQueryAttention", 5): _last_keys,
    ("GroupQueryAttention", 6): _total,
    ("Attention", 6): _valid_keys,
    ("TensorScatter", 2): _first_entries,
}
