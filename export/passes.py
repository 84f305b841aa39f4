"""Tidy a traced graph: small passes, each with what it needs and ensures.

`lower` runs on the traced layers, where values have shapes; `finish` on the whole model. Passes edit standard operators
by dataflow and shape; they know no family, no engine and no weight's value (a parameter is an initializer without data,
see `weights`).
"""

from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter

from specdec.engines.contract import ModelSpec
from specdec.engines.errors import ExportError
from specdec.export.canonical import CanonicalForm, ContractForm, is_parameter
from specdec.export.edit import constant, insert, nodes_of, replace_output
from specdec.export.projections import JoinedProjections
from specdec.export.weights import TRANSPOSED

SMALL = 64  # elements of a constant that may be computed here


def lower(model: ir.Model) -> ir.Model:
    """Fold and merge what a trace leaves behind (constants, shape arithmetic, repetitions); prepare attention."""
    return run_passes(
        model,
        [
            Folded(),
            ConstantReshapes(),
            PackedGroups(),
            common.IdentityEliminationPass(),
            MergedConstants(),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
        ],
    )


def finish(model: ir.Model, spec: ModelSpec) -> ir.Model:
    """Store weights as products read them, name and order everything reproducibly, and check the contract."""
    return run_passes(
        model,
        [
            TiedHead(),
            TransposedWeights(),
            JoinedProjections(),
            MergedConstants(),
            common.RemoveUnusedNodesPass(),
            CanonicalForm(),
            ContractForm(spec),
        ],
    )


class Folded(ir.passes.InPlacePass):
    """Compute what depends on small constants and static shapes alone, and drop what does nothing.

    Needs parameters without data, so that none is folded. Whole slices, casts to the same type and the like go.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run onnxscript's folding, with a limit on sizes, and its rewrite rules."""
        folded = optimizer.fold_constants_ir(
            model, onnx_shape_inference=True, input_size_limit=SMALL, output_size_limit=SMALL
        )
        rewriter.rewrite(model)
        return ir.passes.PassResult(model, modified=folded.modified)


class MergedConstants(ir.passes.InPlacePass):
    """Make every constant an initializer, and equal constants one, so that nodes which differ by them alone can merge.

    Parameters have no data here and are left as they are.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lift Constant nodes, then point every reader of equal data to one initializer."""
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        first: dict[tuple[object, ...], ir.Value] = {}
        changed = False
        for name, value in list(model.graph.initializers.items()):
            tensor = value.const_value
            if tensor is None:
                continue
            kept = first.setdefault((tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()), value)
            if kept is not value:
                value.replace_all_uses_with(kept)
                del model.graph.initializers[name]
                changed = True
        return ir.passes.PassResult(model, modified=changed)


class ConstantReshapes(ir.passes.InPlacePass):
    """Give Reshape a constant shape: 0 copies an axis, one -1 stands for what is left.

    Needs value shapes. Ensures that a Reshape whose dynamic axes stay where they are reads no computed shape.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the second input of every Reshape that allows it."""
        changed = False
        for node in nodes_of(model, "Reshape"):
            source, target = node.inputs[0], node.outputs[0]
            if source is None or source.shape is None or target.shape is None:
                continue
            sizes = [_constant_size(axis, source.shape, target.shape) for axis in range(len(target.shape))]
            if sizes.count(-1) <= 1:
                node.replace_input_with(1, constant(node, sizes))
                node.attributes.pop("allowzero", None)
                changed = True
        return ir.passes.PassResult(model, modified=changed)


class PackedGroups(ir.passes.InPlacePass):
    """Let the query heads that share a key head attend as further rows of it.

    Needs value shapes, 4-D Attention with an explicit mask. [B, G * Hkv, S, D] is read as [B, Hkv, G * S, D], which
    moves nothing, under a mask repeated G times. Each key head is read once instead of G times, and a chunk of one
    token runs the same matrix kernels as a longer one, so on ONNX Runtime CPU it gives the same bits.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Reshape the queries and outputs of every Attention with grouped heads."""
        repeated: dict[tuple[ir.Value, int], ir.Value] = {}
        changed = False
        for node in nodes_of(model, "Attention"):
            query, keys, mask = node.inputs[0], node.inputs[1], node.inputs[3]
            if query is None or keys is None or mask is None or query.shape is None or keys.shape is None:
                raise ExportError(f"{node.name}: Attention without shapes or without a mask")
            heads, shared, size = query.shape[1], keys.shape[1], query.shape[3]
            if not isinstance(heads, int) or not isinstance(shared, int) or not isinstance(size, int):
                raise ExportError(f"{node.name}: Attention has {heads} query and {shared} key heads of {size}")
            groups = heads // shared
            if groups == 1:
                continue
            if (mask, groups) not in repeated:
                repeated[mask, groups] = insert(node, "Concat", [mask] * groups, axis=2)
            packed = insert(node, "Reshape", [query, constant(node, [0, shared, -1, size])])
            inputs = [packed, *node.inputs[1:3], repeated[mask, groups]]
            attended = insert(node, "Attention", inputs, scale=node.attributes.get_float("scale"))
            replace_output(node, insert(node, "Reshape", [attended, constant(node, [0, heads, -1, size])]))
            changed = True
        return ir.passes.PassResult(model, modified=changed)


class TiedHead(ir.passes.InPlacePass):
    """Let a head that is tied to the embedding read the embedding as it lies: Gemm(transB) on [B * N, H].

    Needs products as MatMul(x, Transpose(parameter)) with x [B, N, H]. Ensures that a parameter which is also read
    untransposed has no transposed copy: measured on ONNX Runtime CPU it costs no time and saves the copy's bytes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the product of every parameter that has other readers."""
        changed = False
        for node in nodes_of(model, "MatMul"):
            hidden, right = node.inputs
            transpose = right.producer() if right is not None else None
            if hidden is None or transpose is None or not _is_transposed_parameter(transpose):
                continue
            parameter = transpose.inputs[0]
            if parameter is None or parameter.shape is None or len(parameter.uses()) == 1:
                continue
            outputs, inputs = (int(size) for size in parameter.shape.numpy())
            flat = insert(node, "Reshape", [hidden, constant(node, [-1, inputs])])  # [B * N, H]
            product = insert(node, "Gemm", [flat, parameter], transB=1)  # [B * N, V]
            leading = insert(node, "Shape", [hidden], start=0, end=2)
            shape = insert(node, "Concat", [leading, constant(node, [outputs])], axis=0)
            replace_output(node, insert(node, "Reshape", [product, shape]))
            changed = True
        return ir.passes.PassResult(model, modified=changed)


class TransposedWeights(ir.passes.InPlacePass):
    """Store a parameter as its product reads it.

    Ensures that no Transpose of a parameter remains: the parameter is stored transposed (`weights.TRANSPOSED`); one
    that is also read as it is gets a second, transposed copy.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace Transpose(parameter) by a transposed parameter."""
        graph = model.graph
        found = [node for node in nodes_of(model, "Transpose") if _is_transposed_parameter(node)]
        for node in found:
            source = node.inputs[0]
            if source is None or source.name is None or source.shape is None:
                raise ExportError(f"{node.name}: a transposed parameter has no name or no shape")
            alone = len(source.uses()) == 1
            name = source.name if alone else f"{source.name}.transposed"
            stored = ir.Value(name=name, type=source.type, shape=ir.Shape(reversed(source.shape.dims)))
            stored.meta.update(source.meta)
            stored.meta[TRANSPOSED] = source.name
            node.outputs[0].replace_all_uses_with(stored)
            graph.remove(node, safe=True)
            if alone:
                del graph.initializers[name]
            graph.initializers[name] = stored
        return ir.passes.PassResult(model, modified=bool(found))


def run_passes(model: ir.Model, passes: Iterable[ir.passes.PassBase]) -> ir.Model:
    """Run `passes` in turn; raises `ExportError` that names the one that failed."""
    for step in passes:
        try:
            model = step(model).model
        except Exception as exc:  # onnx_ir wraps what a pass raises, and a pass of a library may raise anything
            cause = exc.__cause__ if isinstance(exc.__cause__, ExportError) else exc
            raise ExportError(f"graph pass {type(step).__name__} failed: {cause}") from exc
    return model


def _is_transposed_parameter(node: ir.Node) -> bool:
    """Whether `node` swaps the two axes of a parameter."""
    source = node.inputs[0] if node.op_type == "Transpose" else None
    return source is not None and is_parameter(source) and source.shape is not None and len(source.shape) == 2


def _constant_size(axis: int, source: ir.Shape, target: ir.Shape) -> int:
    """What a constant Reshape says for `axis`: its size, 0 for "as in the source", -1 for "what is left"."""
    size = target[axis]
    if isinstance(size, int):
        return size
    return 0 if axis < len(source) and size.value is not None and source[axis] == size else -1
