"""Any token tree in one pass of a real graph gives every node the logits of its path decoded alone.

To the bit on the first branch, whose slots lie as a chain's do; within rounding behind siblings that a node must not
see. And a path whose slots are copied together afterwards goes on like a text that was decoded plainly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.engines.base import Engine, KVBuffers
from specdec.engines.chunk import RowInput, nodes_to, pack
from specdec.engines.contract import Chunk, FloatArray
from specdec.engines.manifest import read_manifest
from specdec.engines.registry import EngineConfig, open_engine
from specdec.engines.scoring import same_bits, score, soil
from specdec.export.options import ExportOptions
from specdec.export.pipeline import export_bundle
from support.bundles import TOKENIZER_SIZE, shared_bundle, shared_checkpoint, tiny_bundle
from support.engines import Faulty, IgnoresTree

TOLERANCE = {"float32": 1e-4, "float16": 5e-2}  # the parity gate's own
MAX_PAST, MAX_NODES, MORE = 40, 14, 4
WINDOW = 5  # of the sliding layers: less than the depth of many trees, so that it ends inside of them
CAPACITY = 64

deterministic = settings(derandomize=True, max_examples=100)


@dataclass(frozen=True)
class Case:
    """One row: a tree of `tokens` behind `past`, `accepted` (a node of it), and what comes after that node."""

    past: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: int
    more: tuple[int, ...]

    @property
    def first_branch(self) -> int:
        """How many leading nodes hang each below the one before."""
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), len(self.parents))

    def text_to(self, node: int) -> list[int]:
        return [*self.past, *(self.tokens[step] for step in nodes_to(self.parents, node))]


@dataclass(frozen=True)
class Graph:
    """A real engine, and the narrowest pass that keeps its bits."""

    engine: Engine
    least_width: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.engine.spec.dtype]


def words(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, TOKENIZER_SIZE - 1), min_size=count, max_size=count)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes = draw(st.integers(1, MAX_NODES))
    return Case(
        past=tuple(draw(st.integers(0, MAX_PAST).flatmap(words))),  # by length: a plain list is mostly short
        tokens=tuple(draw(words(nodes))),
        parents=tuple(draw(st.just(node - 1) | st.integers(-1, node - 1)) for node in range(nodes)),
        accepted=draw(st.integers(0, nodes - 1)),
        more=tuple(draw(words(MORE))),
    )


batches = st.lists(cases(), min_size=1, max_size=2)


# Two roots and a path in the gaps behind more than a window; the other row is short, and its path lies as a chain.
EXAMPLE = Case(tuple(range(5, 40)), (7, 8, 9, 10, 11, 12), (-1, 0, 0, 2, 1, -1), accepted=3, more=(1, 2, 3, 4))
SHORT = Case((3,), (7, 8, 9), (-1, 0, -1), accepted=1, more=(4, 3, 2, 1))


class CountsSlots(Faulty):
    def chunk(self, chunk: Chunk) -> Chunk:
        return replace(chunk, position_ids=chunk.past_lens[:, None] + np.arange(chunk.width))


def open_bundle(bundle: Path) -> Graph:
    manifest = read_manifest(bundle)
    (variant,) = manifest.target.variants.values()
    engine = open_engine(bundle / variant.graph, manifest.target.spec, EngineConfig(threads=1))
    return Graph(engine, variant.invariance.least_width)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2", "fp16"])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("bundle")
    if request.param == "gemma3_text":
        return open_bundle(tiny_bundle(folder / "window", "gemma3_text", sliding_window=WINDOW))
    if request.param == "fp16":
        export_bundle(ExportOptions(model=str(shared_checkpoint()), output=folder / "half", precision="fp16"))
        return open_bundle(folder / "half")
    return open_bundle(shared_bundle(request.param))


def run_tree(graph: Graph, rows: Sequence[Case]) -> tuple[KVBuffers, FloatArray]:
    """One pass over all trees behind their pasts on a used cache: logits [B, nodes of the widest, V]."""
    engine = graph.engine
    kv = engine.allocate(len(rows), CAPACITY)
    soil(engine, kv)
    for index, row in enumerate(rows):
        if row.past:
            engine.step(chunk(graph, [RowInput(row.past, 0)], [0]), kv, index)
    inputs = [RowInput(row.tokens, len(row.tokens), row.parents) for row in rows]
    return kv, engine.step(chunk(graph, inputs, [len(row.past) for row in rows]), kv).copy()


def chunk(graph: Graph, inputs: Sequence[RowInput], past: Sequence[int]) -> Chunk:
    return pack(inputs, np.array(past, np.int64), graph.least_width, graph.engine.spec.max_length)


def plain(graph: Graph, text: Sequence[int]) -> FloatArray:
    """Logits [len, V] of a text decoded alone, from the start, in one pass."""
    kv = graph.engine.allocate(1, CAPACITY)
    return score(graph.engine, kv, [text], [len(text)], least=graph.least_width)[0]


def difference(left: FloatArray, right: FloatArray) -> float:
    return float(np.abs(left.astype(np.float32) - right.astype(np.float32)).max())


def check_nodes(graph: Graph, rows: Sequence[Case]) -> None:
    _, logits = run_tree(graph, rows)
    for index, row in enumerate(rows):
        for node in range(len(row.tokens)):
            found, expected = logits[index, node], plain(graph, row.text_to(node))[-1]
            assert difference(found, expected) < graph.tolerance, (index, node)
            assert node >= row.first_branch or same_bits(found, expected), (index, node)


@deterministic
@given(rows=batches)
@example(rows=[EXAMPLE, SHORT])
def test_every_node_has_the_logits_of_its_path(graph: Graph, rows: list[Case]) -> None:
    check_nodes(graph, rows)


@deterministic
@given(rows=batches)
@example(rows=[EXAMPLE, SHORT])
def test_an_accepted_path_goes_on_like_a_plain_text(graph: Graph, rows: list[Case]) -> None:
    kv, _ = run_tree(graph, rows)
    lens = []
    for index, row in enumerate(rows):
        nodes = nodes_to(row.parents, row.accepted)
        lens.append(len(row.past) + len(nodes))
        if row.accepted >= row.first_branch:
            gather(kv, index, len(row.past), nodes)
    logits = graph.engine.step(chunk(graph, [RowInput(row.more, MORE) for row in rows], lens), kv)
    for index, row in enumerate(rows):
        expected = plain(graph, [*row.text_to(row.accepted), *row.more])[-MORE:]
        assert difference(logits[index], expected) < graph.tolerance, index
        assert row.accepted >= row.first_branch or same_bits(logits[index], expected), index  # and nothing was copied


def gather(kv: KVBuffers, row: int, start: int, nodes: Sequence[int]) -> None:
    """Copy the slots of a tree's `nodes` to `start`, `start + 1`, ..., where a chain would have them."""
    for array in kv._memory.host:  # type: ignore[attr-defined]  # the ONNX Runtime CPU buffers
        array[row, :, start : start + len(nodes)] = array[row][:, [start + node for node in nodes]]


@pytest.mark.parametrize("fault", [IgnoresTree, CountsSlots])
def test_a_wrong_mask_or_position_shows(graph: Graph, fault: type[Faulty]) -> None:
    check_nodes(graph, [EXAMPLE])
    with pytest.raises(AssertionError, match=r"\(0, \d\)"):
        check_nodes(replace(graph, engine=fault(graph.engine)), [EXAMPLE])


def test_a_path_left_where_it_is_does_not_go_on(graph: Graph) -> None:
    kv, _ = run_tree(graph, [EXAMPLE])
    past = len(EXAMPLE.past) + len(nodes_to(EXAMPLE.parents, EXAMPLE.accepted))
    logits = graph.engine.step(chunk(graph, [RowInput(EXAMPLE.more, MORE)], [past]), kv)
    expected = plain(graph, [*EXAMPLE.text_to(EXAMPLE.accepted), *EXAMPLE.more])[-MORE:]
    assert difference(logits[0], expected) > 10 * graph.tolerance
