"""Changes a graph so that it computes no more than is asked for: logits of the last token only, and hidden states.

The logits of a whole prompt are its tokens times the vocabulary, which takes 1.2 GB for 2,048 tokens of a 152k
vocabulary, and computing them up to a quarter of the prompt's time; only the last row is ever used."""

import onnx
from onnx import TensorProto, helper

HIDDEN = "tokenbus.hidden"
"""The output that is added: what each token has become, of (batch, tokens, width)."""
_LAST = "tokenbus.last"
_PROJECTIONS = ("MatMul", "MatMulNBits", "MatMulBnb4", "MatMulIntegerToFloat", "FusedMatMul")
"""Those that keep the axes of their input; a Gemm takes matrices, which have none of tokens."""
_AFTER_PROJECTION = ("Cast", "Add", "Mul", "Div", "Tanh", "Identity")
"""What may come behind the projection: a bias, a cap, another type."""


def keep_last_logits(model: onnx.ModelProto, logits: str) -> bool:
    """Has the graph compute logits for the last token alone; False, and no change, where it isn't built for that."""
    graph = model.graph
    node = _projection(graph, logits)
    if node is None:
        return False
    hidden = node.input[0]
    sliced = f"{_LAST}.hidden"
    for name, value in (("start", -1), ("end", 2**31 - 1), ("axis", 1)):
        graph.initializer.append(helper.make_tensor(f"{_LAST}.{name}", TensorProto.INT64, [1], [value]))
    inputs = [hidden, f"{_LAST}.start", f"{_LAST}.end", f"{_LAST}.axis"]
    graph.node.insert(list(graph.node).index(node), helper.make_node("Slice", inputs, [sliced]))
    node.input[0] = sliced
    value = next(value for value in graph.output if value.name == logits)
    value.type.tensor_type.shape.dim[1].Clear()
    value.type.tensor_type.shape.dim[1].dim_value = 1
    return True


def expose_hidden_states(model: onnx.ModelProto, logits: str) -> bool:
    """Adds the states that logits are made of as an output; False, and no change, where they can't be found.

    To be called before `keep_last_logits`."""
    graph = model.graph
    node = _projection(graph, logits)
    if node is None:
        return False
    graph.node.append(helper.make_node("Cast", [node.input[0]], [HIDDEN], to=TensorProto.FLOAT))
    graph.output.append(helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, ["batch", "sequence", "width"]))
    return True


def _projection(graph: onnx.GraphProto, logits: str) -> onnx.NodeProto | None:
    """The node that makes logits of hidden states; None where there is none, or logits are not by row and token."""
    value = next(value for value in graph.output if value.name == logits)
    if len(value.type.tensor_type.shape.dim) != 3:
        return None
    makers: dict[str, onnx.NodeProto] = {output: node for node in graph.node for output in node.output}
    weights = {tensor.name for tensor in graph.initializer}
    name = logits
    while (node := makers.get(name)) is not None:
        if node.op_type in _PROJECTIONS and node.input[0] not in weights:
            return node
        sources = [one for one in node.input if one in makers and not _is_constant(makers[one])]
        if node.op_type not in _AFTER_PROJECTION or len(sources) != 1:
            return None
        name = sources[0]
    return None


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type in ("Constant", "Transpose", "DequantizeLinear")
