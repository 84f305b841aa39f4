"""Whether a graph that ONNX Runtime has loaded keeps the contract: names, types and fixed axes of its ends."""

from typing import Any

from specdec.engines.contract import FEATURES, HIDDEN, LOGITS, Dtype, ModelSpec, past_names, present_names
from specdec.engines.errors import ContractError

ORT_TYPES: dict[Dtype, str] = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
}


def check_ends(session: Any, spec: ModelSpec) -> None:
    """Compare the graph of a session with the contract of `spec`; raise `ContractError` on the first difference."""
    past, present = list(past_names(spec.num_layers)), list(present_names(spec.num_layers))
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    if set(inputs) != {*spec.inputs, *past} or outputs != [*spec.outputs, *present]:
        odd = sorted(set(inputs) ^ {*spec.inputs, *past}) + sorted(set(outputs) ^ {*spec.outputs, *present})
        raise ContractError(f"the graph does not keep the engine contract: {', '.join(odd[:5]) or 'order of outputs'}")
    for name in past:
        value = inputs[name]
        fixed = (value.shape[1], value.shape[3])
        if value.type != ORT_TYPES[spec.dtype] or fixed != (spec.num_kv_heads, spec.head_dim):
            raise ContractError(f"{name} is {value.type} {value.shape}, the manifest says {spec.dtype}, {fixed}")
    sizes = [(FEATURES, inputs[FEATURES], spec.features)] if spec.features else []
    sizes += [(HIDDEN, session.get_outputs()[1], spec.tapped_size)] if spec.taps else []
    for name, value, size in sizes:
        if value.type != ORT_TYPES[spec.dtype] or value.shape[2] != size:
            raise ContractError(f"{name} is {value.type} {value.shape}, the manifest says {spec.dtype}, {size} wide")
    logits = session.get_outputs()[0]
    if logits.type != ORT_TYPES[spec.logits_dtype] or logits.shape[2] != spec.logits_size:
        said = f"{spec.logits_dtype}, {spec.logits_size} wide"
        raise ContractError(f"{LOGITS} is {logits.type} {logits.shape}, the manifest says {said}")
