"""Products of one input as one product: several small products cost more than one on every engine.

Two passes over the whole model, after parameters have been stored as products read them. They edit by dataflow: they
know Attention, TensorScatter and what lies before them, no family and no weight's value (`weights.PARTS` says what
joins).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from specdec.engines.errors import ExportError
from specdec.export.canonical import is_parameter
from specdec.export.edit import constant, insert, nodes_of, replace_output
from specdec.export.weights import ALIASES, PARTS, TRANSPOSED, parts_of

_SWAP = (0, 2, 1, 3)  # [B, S, H, D] <-> [B, H, S, D]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Transpose(Reshape(MatMul(hidden, weight) [+ bias])): the heads of one projection, [B, H, S, D]."""

    heads: ir.Value
    hidden: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    count: int
    size: int


class JoinedProjections(ir.passes.InPlacePass):
    """Compute the query, key and value heads of a layer in one MatMul, one Transpose and one RotaryEmbedding.

    Needs weights stored transposed (`TransposedWeights`). Layers whose queries or keys are normed, and projections that
    are joined already, are left as they are. No sum changes its order: the results are the same bits.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Join the projections of every Attention that allows it."""
        joined = [_join(model.graph, attention) for attention in nodes_of(model, "Attention")]
        return ir.passes.PassResult(model, modified=any(joined))


class JoinedProducts(ir.passes.InPlacePass):
    """Compute products that read the same input, as gate and up, in one MatMul whose result is split.

    Needs weights stored transposed. `key` says of a weight's names what has to be equal to be joined; None joins with
    nothing. No sum changes its order.
    """

    def __init__(self, key: Callable[[Sequence[str]], Hashable | None]) -> None:
        """Join products of equal `key`."""
        super().__init__()
        self._key = key

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Join every group of two or more."""
        groups: dict[tuple[ir.Value, Hashable], list[ir.Node]] = {}
        for node in nodes_of(model, "MatMul"):
            hidden, weight = node.inputs
            if hidden is None or weight is None or not is_parameter(weight) or len(weight.uses()) > 1:
                continue
            if TRANSPOSED not in weight.meta or ALIASES in weight.meta:
                continue
            key = self._key([name for name, _ in parts_of(weight)])
            if key is not None:
                groups.setdefault((hidden, key), []).append(node)
        found = [nodes for nodes in groups.values() if len(nodes) > 1]
        for nodes in found:
            weights = [node.inputs[1] for node in nodes if node.inputs[1] is not None]
            product = insert(nodes[0], "MatMul", [nodes[0].inputs[0], _parameter(model.graph, weights)])
            sizes = [sum(size for _, size in parts_of(weight)) for weight in weights]
            split = ir.node("Split", [product, constant(nodes[0], sizes)], {"axis": -1}, num_outputs=len(nodes))
            model.graph.insert_before(nodes[0], split)
            for node, output in zip(nodes, split.outputs, strict=True):
                replace_output(node, output)
        return ir.passes.PassResult(model, modified=bool(found))


def _join(graph: ir.Graph, attention: ir.Node) -> bool:
    packed, keys, values = (_producer(value) for value in attention.inputs[:3])
    if packed is None or keys is None or values is None or {keys.op_type, values.op_type} != {"TensorScatter"}:
        return False
    rotary_q = _producer(packed.inputs[0]) if packed.op_type == "Reshape" else packed
    rotary_k = _producer(keys.inputs[1])
    if rotary_q is None or rotary_k is None or not _same_rotation(rotary_q, rotary_k):
        return False
    branches = [_branch(value) for value in (rotary_q.inputs[0], rotary_k.inputs[0], values.inputs[1])]
    query, key, value = branches
    if query is None or key is None or value is None or not _joinable(query, key, value):
        return False
    count = query.count + key.count
    before = next(node for node in graph if node in (rotary_q, rotary_k))  # whichever comes first
    product = insert(before, "MatMul", [query.hidden, _parameter(graph, [query.weight, key.weight, value.weight])])
    if query.bias is not None and key.bias is not None and value.bias is not None:
        product = insert(before, "Add", [product, _parameter(graph, [query.bias, key.bias, value.bias])])
    split = insert(before, "Reshape", [product, constant(before, [0, 0, count + value.count, query.size])])
    heads = insert(before, "Transpose", [split], perm=_SWAP)  # [B, Hq + 2 Hkv, S, D]
    turning, still = _split(before, heads, [count, value.count])
    cos, sin = rotary_q.inputs[1:3]
    turned = insert(before, "RotaryEmbedding", [turning, cos, sin], **_attributes(rotary_q))
    queries, new_keys = _split(before, turned, [query.count, key.count])
    for old, new in ((rotary_q.outputs[0], queries), (rotary_k.outputs[0], new_keys), (value.heads, still)):
        old.replace_all_uses_with(new)
    return True


def _producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None else None


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _same_rotation(left: ir.Node, right: ir.Node) -> bool:
    """Whether both are RotaryEmbedding with the same cos, sin and attributes, read once each."""
    return (
        left.op_type == right.op_type == "RotaryEmbedding"
        and len(left.inputs) == len(right.inputs) == 3
        and left.inputs[1:] == right.inputs[1:]
        and _attributes(left) == _attributes(right)
        and all(len(node.outputs[0].uses()) == 1 for node in (left, right))
    )


def _branch(value: ir.Value | None) -> _Branch | None:
    """Match the projection whose heads `value` is; None when it is another computation or has other readers."""
    transpose = _producer(value)
    if value is None or transpose is None or transpose.op_type != "Transpose":
        return None
    reshape = _producer(transpose.inputs[0])
    if tuple(transpose.attributes["perm"].as_ints()) != _SWAP or reshape is None or reshape.op_type != "Reshape":
        return None
    shape = ir.convenience.get_const_tensor(reshape.inputs[1]) if reshape.inputs[1] is not None else None
    product, bias = _producer(reshape.inputs[0]), None
    if product is not None and product.op_type == "Add":
        bias = next((read for read in product.inputs if read is not None and is_parameter(read)), None)
        product = _producer(next((read for read in product.inputs if read is not bias), None))
    if product is None or product.op_type != "MatMul" or shape is None:
        return None
    hidden, weight = product.inputs
    sizes = [int(size) for size in shape.numpy()]
    own = [value, transpose.inputs[0], reshape.inputs[0], product.outputs[0], weight, bias]
    single = all(len(part.uses()) == 1 for part in own if part is not None)
    if hidden is None or weight is None or not is_parameter(weight) or len(sizes) != 4 or sizes[:2] != [0, 0]:
        return None
    return _Branch(value, hidden, weight, bias, sizes[2], sizes[3]) if single else None


def _joinable(*branches: _Branch) -> bool:
    first = branches[0]
    return all(
        branch.hidden is first.hidden
        and branch.size == first.size
        and (branch.bias is None) == (first.bias is None)
        and TRANSPOSED in branch.weight.meta
        and ALIASES not in branch.weight.meta
        for branch in branches
    )


def _parameter(graph: ir.Graph, sources: list[ir.Value]) -> ir.Value:
    """The parameters `sources` as one, side by side along their last axis as stored; they leave the graph."""
    name, shapes = sources[0].name, [source.shape for source in sources]
    if name is None or None in shapes:
        raise ExportError(f"parameter {name} has no name or no shape")
    sizes = [[int(size) for size in shape.numpy()] for shape in shapes if shape is not None]
    joined = ir.Value(
        name=f"{name}.joined",
        type=sources[0].type,
        shape=ir.Shape([*sizes[0][:-1], sum(size[-1] for size in sizes)]),
    )
    joined.meta[PARTS] = tuple(part for source in sources for part in parts_of(source))
    if TRANSPOSED in sources[0].meta:
        joined.meta[TRANSPOSED] = joined.name
    for source in sources:
        del graph.initializers[source.name or ""]
    graph.initializers.add(joined)
    return joined


def _split(before: ir.Node, value: ir.Value, counts: list[int]) -> tuple[ir.Value, ir.Value]:
    """Insert a Split of the heads' axis into two."""
    node = ir.node("Split", [value, constant(before, counts)], {"axis": 1}, num_outputs=2)
    if before.graph is None:
        raise ExportError(f"{before.name} is in no graph")
    before.graph.insert_before(before, node)
    return node.outputs[0], node.outputs[1]
