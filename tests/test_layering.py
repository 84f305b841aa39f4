"""Imports go one way, export → engines ← runtime ← tools, and no module grows long without saying why.

Modules are parsed, not imported, so a lazy import inside a function counts too. A module of more than 300 lines needs a
line that starts with "Length:" in its docstring.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Layer: the layers that it may import.
LAYERS = {
    "engines": {"engines"},
    "export": {"export", "engines"},
    "runtime": {"runtime", "engines"},
    "serve": {"serve", "runtime", "engines"},
    "tools": {"tools", "runtime", "export", "engines"},
    "train": {"train", "runtime", "export", "engines"},
}
# Never in these layers, not even lazily: the lean runtime must work without them.
LEAN_LAYERS = {"engines", "runtime", "serve"}
OFFLINE = {
    *("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "gguf", "accelerate", "safetensors"),
    *("huggingface_hub", "rich"),
}
# Never while a module is being imported: only the engine that was asked for may be loaded.
VENDORS = {"onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_llm", "cuda", "pycuda"}
# The exceptions: each belongs to one vendor's boundary; all others may only import it inside a function.
BOUNDARIES = {"specdec.engines.ort": "onnxruntime", "specdec.engines.ort_kv": "onnxruntime"}
# Never while a module of these layers is being imported; `export` exists to use them.
LIGHT_LAYERS = {"engines", "runtime", "serve", "tools"}

MAX_LINES = 300


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted name, line, whether it happens when the module is imported) for every import in a module."""
    yield from _imports(tree.body, at_import=True)


def _imports(nodes: list[ast.AST] | list[ast.stmt], at_import: bool) -> Iterator[tuple[str, int, bool]]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno, at_import) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                source = "." * level + (module or "")
                dotted = [f"{source}.{alias.name}" for alias in names]
                if source != "specdec":  # `from specdec import runtime` names modules, other forms may
                    dotted = [name for name in dotted if name in BOUNDARIES] or [source]
                yield from ((name, node.lineno, at_import) for name in dotted)
            case ast.Call(func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module")):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value), node.lineno, at_import
                yield from _imports(list(ast.iter_child_nodes(node)), at_import)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(node.body, at_import=False)
                yield from _imports(node.orelse, at_import)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(list(ast.iter_child_nodes(node)), at_import=False)
            case _:
                yield from _imports(list(ast.iter_child_nodes(node)), at_import)


def violations(layer: str, source: str, name: str = "module.py") -> list[str]:
    """Return one line for every import in `source`, a module of `layer`, that is not allowed there."""
    own_vendor = BOUNDARIES.get(f"specdec.{name.removesuffix('.py').replace('/', '.')}")
    found = []
    for imported, line, at_import in imports(ast.parse(source)):
        top, _, rest = imported.partition(".")
        part = rest.partition(".")[0]
        if not top:
            found.append(f"{name}:{line}: relative import of {imported}")
        elif top == "specdec" and part not in LAYERS[layer]:
            found.append(f"{name}:{line}: {layer} imports {imported}")
        elif top in OFFLINE and layer in LEAN_LAYERS:
            found.append(f"{name}:{line}: {layer} imports {imported}, which the lean runtime does not have")
        elif at_import and BOUNDARIES.get(imported, own_vendor) != own_vendor:
            found.append(f"{name}:{line}: {imported} loads a vendor's library; import it inside a function")
        elif at_import and (top in VENDORS - {own_vendor} or (top in OFFLINE and layer in LIGHT_LAYERS)):
            found.append(f"{name}:{line}: {imported} is loaded when the module is imported")
    return found


def too_long(source: str) -> bool:
    """Whether a module has more than MAX_LINES lines and its docstring does not say why."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    excused = any(line.startswith("Length:") for line in docstring.splitlines())
    return len(source.splitlines()) > MAX_LINES and not excused


MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def test_every_layer_has_modules() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    relative = path.relative_to(ROOT)
    assert violations(relative.parts[0], path.read_text(), str(relative)) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short_or_say_why(path: Path) -> None:
    assert not too_long(path.read_text()), f'over {MAX_LINES} lines: split it, or add a "Length:" line to the docstring'


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("engines", "import specdec.runtime.llm"),
        ("engines", "from specdec.export import trace"),
        ("engines", "from specdec import tools"),
        ("engines", "import specdec"),
        ("export", "from specdec.runtime.sampling import probabilities"),
        ("export", "def late():\n    from specdec import runtime"),
        ("export", "import onnxruntime"),
        ("runtime", "from specdec.tools.doctor import main"),
        ("runtime", "from specdec.export.pipeline import export"),
        ("runtime", "def late():\n    import torch"),
        ("runtime", "def late():\n    from transformers.models import llama"),
        ("runtime", "if TYPE_CHECKING:\n    import torch"),
        ("runtime", "import importlib\nlate = lambda: importlib.import_module('onnx.helper')"),
        ("engines", "def late():\n    return __import__('onnx_ir')"),
        ("engines", "import onnxruntime as ort"),
        ("engines", "from specdec.engines.ort import OrtEngine"),
        ("runtime", "from specdec.engines import errors, ort"),
        ("engines", "try:\n    from onnxruntime import InferenceSession\nexcept ImportError:\n    pass"),
        ("engines", "class Engine:\n    import tensorrt"),
        ("engines", "if not TYPE_CHECKING:\n    import tensorrt"),
        ("engines", "if TYPE_CHECKING:\n    pass\nelse:\n    import tensorrt_rtx"),
        ("engines", "import importlib\nort = importlib.import_module('onnxruntime')"),
        ("tools", "import torch"),
        ("runtime", "from .sampling import probabilities"),
        ("runtime", "from . import sampling"),
    ],
)
def test_planted_violations_are_found(layer: str, source: str) -> None:
    assert len(violations(layer, source)) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("engines", "from specdec.engines.errors import EngineError\nimport numpy as np"),
        ("engines", "def load():\n    import onnxruntime as ort"),
        ("engines", "if TYPE_CHECKING:\n    import onnxruntime as ort"),
        ("export", "import torch\nimport onnx\nfrom specdec.engines import contract"),
        ("runtime", "from specdec.engines.base import Engine\nfrom specdec.runtime.drafters import ngram"),
        ("tools", "from specdec import export, runtime\nfrom specdec.engines import registry"),
        ("tools", "def train():\n    import torch"),
    ],
)
def test_allowed_imports_are_allowed(layer: str, source: str) -> None:
    assert violations(layer, source) == []


def test_a_boundary_may_load_its_own_vendor_and_no_other() -> None:
    assert violations("engines", "import onnxruntime", "engines/ort.py") == []
    assert len(violations("engines", "import tensorrt", "engines/ort.py")) == 1
    assert len(violations("engines", "import onnxruntime", "engines/other.py")) == 1
    assert violations("engines", "from specdec.engines.ort_kv import OrtKV", "engines/ort.py") == []
    assert len(violations("engines", "from specdec.engines.ort_kv import OrtKV", "engines/other.py")) == 1


def test_a_long_module_needs_a_reason() -> None:
    body = "x = 1\n" * MAX_LINES
    assert not too_long(body)
    assert too_long('"""One table."""\n' + body)
    assert not too_long('"""One table.\n\nLength: one row for each operator.\n"""\n' + body)
