"""Medusa heads on ONNX Runtime: hidden states in, logits out, nothing kept. Knows no token and no tree."""

from pathlib import Path

from specdec.engines.contract import FEATURES, LOGITS, FloatArray, HeadsSpec
from specdec.engines.errors import ContractError, EngineError
from specdec.engines.ort_ends import ORT_TYPES


class OrtHeads:
    """The graph of `spec` in one ONNX Runtime session; see `Heads`."""

    def __init__(self, graph: Path, spec: HeadsSpec, *, provider: str = "cpu", threads: int | None = None) -> None:
        from specdec.engines.ort import open_session  # loads ONNX Runtime

        self.spec = spec
        session = open_session(graph, provider, threads)
        ends = [(value.name, value.type, value.shape[1:]) for value in (*session.get_inputs(), *session.get_outputs())]
        real = ORT_TYPES[spec.dtype]
        wanted = [(FEATURES, real, [spec.hidden_size]), (LOGITS, real, [spec.heads, spec.logits_size])]
        if ends != wanted:
            raise ContractError(f"the graph of the heads has {ends}, the manifest says {wanted}")
        self._session = session
        self._closed = False

    def logits(self, features: FloatArray) -> FloatArray:
        """See `Heads.logits`."""
        if self._closed:
            raise EngineError("the heads are closed")
        if features.ndim != 2 or features.shape[1] != self.spec.hidden_size:
            raise ContractError(f"the features are {features.shape}, the heads take rows of {self.spec.hidden_size}")
        try:
            (logits,) = self._session.run([LOGITS], {FEATURES: features.astype(self.spec.dtype, copy=False)})
        except Exception as exc:  # onnxruntime raises classes of its own that share no public base
            raise EngineError(f"ONNX Runtime failed on the heads of {len(features)} rows: {exc}") from exc
        found: FloatArray = logits
        return found

    def close(self) -> None:
        """See `Heads.close`."""
        self._closed = True
