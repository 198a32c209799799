"""Changes a graph before it is loaded: logits of the last token only, and hidden states as an output.

The logits of a whole prompt are its tokens times the vocabulary: 1.2 GB for 2,048 tokens of a vocabulary of 152,000.
Computing them takes up to a quarter of the prompt's time, and only the last row is ever used. Both edits look for the
projection, the node that turns hidden states into logits, by following the graph back from its output."""

import onnx
from onnx import TensorProto, helper

HIDDEN = "tokenbus.hidden"
"""The added output: the hidden states, of (batch, tokens, width)."""
_LAST = "tokenbus.last"
_PROJECTIONS = ("MatMul", "MatMulNBits", "MatMulBnb4", "MatMulIntegerToFloat", "FusedMatMul")
"""Nodes that keep the axes of their input. Gemm is not one of them: it takes matrices, which have no token axis."""
_AFTER_PROJECTION = ("Cast", "Add", "Mul", "Div", "Tanh", "Identity")
"""Nodes that may follow the projection: a bias, a cap, a conversion."""


def keep_last_logits(model: onnx.ModelProto, logits: str) -> bool:
    """Makes the graph compute only the last token's logits. Returns False, changing nothing, if it can't."""
    graph = model.graph
    node = _projection(graph, logits)
    if node is None:
        return False
    sliced = f"{_LAST}.hidden"
    for name, value in (("start", -1), ("end", 2**31 - 1), ("axis", 1)):
        graph.initializer.append(helper.make_tensor(f"{_LAST}.{name}", TensorProto.INT64, [1], [value]))
    inputs = [node.input[0], f"{_LAST}.start", f"{_LAST}.end", f"{_LAST}.axis"]
    # Nodes must be in topological order, so the slice goes right before the projection.
    graph.node.insert(list(graph.node).index(node), helper.make_node("Slice", inputs, [sliced]))
    node.input[0] = sliced
    output = next(value for value in graph.output if value.name == logits)
    output.type.tensor_type.shape.dim[1].Clear()
    output.type.tensor_type.shape.dim[1].dim_value = 1
    return True


def expose_hidden_states(model: onnx.ModelProto, logits: str) -> bool:
    """Adds the states from which logits are computed as an output. Returns False, changing nothing, if it can't find
    them.

    It must run before `keep_last_logits`, which leaves only the state of the last token."""
    graph = model.graph
    node = _projection(graph, logits)
    if node is None:
        return False
    graph.node.append(helper.make_node("Cast", [node.input[0]], [HIDDEN], to=TensorProto.FLOAT))
    graph.output.append(helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, ["batch", "sequence", "width"]))
    return True


def _projection(graph: onnx.GraphProto, logits: str) -> onnx.NodeProto | None:
    """Returns the node that turns hidden states into logits, or None if it can't be identified.

    Logits must be of (batch, tokens, vocabulary)."""
    value = next(value for value in graph.output if value.name == logits)
    if len(value.type.tensor_type.shape.dim) != 3:
        return None
    makers: dict[str, onnx.NodeProto] = {output: node for node in graph.node for output in node.output}
    weights = {tensor.name for tensor in graph.initializer}
    name = logits
    while (node := makers.get(name)) is not None:
        if node.op_type in _PROJECTIONS and node.input[0] not in weights:
            return node
        # Continue through the only computed input. With two, either could carry the states.
        sources = [one for one in node.input if one in makers and not _is_constant(makers[one])]
        if node.op_type not in _AFTER_PROJECTION or len(sources) != 1:
            return None
        name = sources[0]
    return None


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type in ("Constant", "Transpose", "DequantizeLinear")
