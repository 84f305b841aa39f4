"""A quantized GGUF's own grid: every block type against gguf's reader, rows and tensors found by what is in them."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from specdec.engines.errors import SourceError
from specdec.export import gguf_grids
from specdec.export.gguf_grids import read_grids
from specdec.export.grid import BOUNDS, Grid
from specdec.export.sources import open_checkpoint
from specdec.tools.models import model_path

ROWS, COLUMNS = 9, 512
# Type: bytes of a block where a float16 number starts; the kind, block and offset of the grid; its least and greatest
# level, which random bytes do reach.
TYPES = {
    Type.Q4_0: ((0,), "int4", 32, False, -8, 7),
    Type.Q4_1: ((0, 2), "int4", 32, True, -8, 7),
    Type.Q5_0: ((0,), "int8", 32, False, -16, 15),
    Type.Q5_1: ((0, 2), "int8", 32, True, -16, 15),
    Type.Q8_0: ((0,), "int8", 32, False, -128, 127),
    Type.Q2_K: ((80, 82), "int4", 16, True, -2, 1),
    Type.Q3_K: ((108,), "int4", 16, False, -4, 3),
    Type.Q4_K: ((0, 2), "int4", 32, True, -8, 7),
    Type.Q5_K: ((0, 2), "int8", 32, True, -16, 15),
    Type.Q6_K: ((208,), "int8", 16, False, -32, 31),
}


def random_tensor(kind: Type, seed: int = 0, rows: int = ROWS) -> np.ndarray:
    """Bytes [rows, bytes of COLUMNS values]: random blocks whose float16 numbers are small."""
    rng = np.random.default_rng(seed)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * COLUMNS // size, width), np.uint8)
    starts = TYPES[kind][0]
    for start in starts:
        numbers = rng.standard_normal((len(blocks), 1)) * 1e-3
        if start < starts[-1]:  # beside an offset, ggml's scales have no sign
            numbers = abs(numbers)
        blocks[:, start : start + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: Mapping[str, tuple[np.ndarray, Type | None]]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(data: np.ndarray, kind: Type) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(data, kind))


def bits(values: np.ndarray | torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def assert_gives(grid: Grid, weight: torch.Tensor) -> None:
    assert np.array_equal(bits(grid.values()), bits(weight))
    low, high = BOUNDS[grid.kind]
    assert low <= grid.levels.min() <= grid.levels.max() <= high


@pytest.fixture(params=[1, gguf_grids.SLAB])
def slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row at a time, and all at once."""
    monkeypatch.setattr(gguf_grids, "SLAB", request.param)


@pytest.mark.usefixtures("slab")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_and_permuted_rows(tmp_path: Path, kind: Type) -> None:
    data = random_tensor(kind)
    path = write(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (data, kind)})
    order = np.random.default_rng(1).permutation(ROWS)
    weights = {"straight": loaded(data, kind), "q_proj": loaded(data, kind)[order]}
    grids = read_grids(path, weights)
    _, form, block, offset, least, greatest = TYPES[kind]
    for name, weight in weights.items():
        grid = grids[name]
        assert_gives(grid, weight)
        assert (grid.kind, grid.block, grid.offset is not None) == (form, block, offset)
        assert (grid.levels.min(), grid.levels.max()) == (least, greatest)
        assert (grid.levels.dtype, grid.scale.dtype) == (np.int8, np.float32)
        assert grid.scale.shape == (ROWS, COLUMNS // block)
    assert np.array_equal(grids["q_proj"].levels, grids["straight"].levels[order])


def q4_1_row(scale: float, offset: float) -> np.ndarray:
    """A row of one block: levels 0, 2, ... 14, 0, 2, ... 14, then 1, 3, ... 15, 1, 3, ... 15."""
    low = np.tile(np.arange(0, 16, 2, dtype=np.uint8), 2)
    return np.concatenate([np.array([scale, offset], np.float16).view(np.uint8), low | (low + 1) << 4])[None]


def test_levels_of_a_block_are_as_written(tmp_path: Path) -> None:
    data = q4_1_row(0.5, -3.0)
    grid = read_grids(write(tmp_path / "a.gguf", {"t": (data, Type.Q4_1)}), {"w": loaded(data, Type.Q4_1)})["w"]
    even = list(range(-8, 8, 2))
    assert grid.levels.tolist() == [even + even + [level + 1 for level in even + even]]
    assert grid.scale.tolist() == [[0.5]]
    assert grid.offset is not None
    assert grid.offset.tolist() == [[-3.0 + 8 * 0.5]]


@pytest.mark.parametrize(
    ("scale", "offset"),
    [
        (1.1 * 2**-12, 2048.0),  # the centre, 8 scales above the offset, is no float32
        (-0.5, -0.0),  # the first level is -0.0, which a level of -8 does not give
    ],
)
def test_levels_stay_as_stored_where_centring_would_round(tmp_path: Path, scale: float, offset: float) -> None:
    data = q4_1_row(scale, offset)
    weight = loaded(data, Type.Q4_1)
    grid = read_grids(write(tmp_path / "a.gguf", {"t": (data, Type.Q4_1)}), {"w": weight})["w"]
    assert_gives(grid, weight)
    assert (grid.kind, grid.levels.min(), grid.levels.max()) == ("int8", 0, 15)
    assert grid.offset is not None
    assert bits(grid.offset) == bits(np.array([[offset]], np.float32))


def test_rows_that_occur_twice_and_names_of_one_tensor(tmp_path: Path) -> None:
    data = random_tensor(Type.Q4_0)
    data[4] = data[2]
    path = write(tmp_path / "a.gguf", {"token_embd.weight": (data, Type.Q4_0)})
    weight = loaded(data, Type.Q4_0).flip(0).contiguous()
    grids = read_grids(path, {"embed": weight, "head": weight, "copy": weight.clone()})
    assert list(grids) == ["embed", "head", "copy"]
    assert grids["embed"] is grids["head"]
    for grid in grids.values():
        assert_gives(grid, weight)


def test_tensors_of_one_shape_are_told_apart(tmp_path: Path) -> None:
    kinds = (Type.Q4_0, Type.Q4_0, Type.Q8_0, Type.Q6_K)
    tensors = {f"t{seed}": (random_tensor(kind, seed), kind) for seed, kind in enumerate(kinds)}
    weights = {name: loaded(*tensor) for name, tensor in reversed(tensors.items())}
    grids = read_grids(write(tmp_path / "a.gguf", tensors), weights)
    assert grids.keys() == weights.keys()
    for name, grid in grids.items():
        assert_gives(grid, weights[name])


def test_what_has_no_grid(tmp_path: Path) -> None:
    data = random_tensor(Type.Q8_0, rows=COLUMNS)
    plain = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    nonlinear = np.random.default_rng(0).integers(0, 60, (4, 18), np.uint8)
    tensors = {
        "quantized": (data, Type.Q8_0),
        "plain": (plain, None),
        "half": (plain.astype(np.float16), None),
        "nonlinear": (nonlinear, Type.IQ4_NL),
    }
    weight = loaded(data, Type.Q8_0)
    changed, bent = weight.clone(), weight.clone()
    changed[3, 7] = torch.nextafter(changed[3, 7], torch.tensor(1.0))
    bent[[0, 1], 0] = bent[[1, 0], 0]  # the same numbers, but rows that the file does not have
    weights = {
        "same": weight,
        "changed": changed,
        "bent": bent,
        "transposed": weight.T,
        "fewer rows": weight[:-1],
        "half of it": weight[:, : COLUMNS // 2],
        "vector": weight[0],
        "float16": weight.half(),
        "plain": torch.from_numpy(plain),
        "half": torch.from_numpy(plain.astype(np.float16).astype(np.float32)),
        "nonlinear": loaded(nonlinear, Type.IQ4_NL),
    }
    assert list(read_grids(write(tmp_path / "a.gguf", tensors), weights)) == ["same"]


def test_a_weight_that_is_a_view(tmp_path: Path) -> None:
    """As a joined or transposed parameter is: not contiguous, and another matrix at the same address."""
    data = random_tensor(Type.Q4_K)
    joined = torch.cat([loaded(data, Type.Q4_K), torch.ones(ROWS, 8)], dim=1)
    weights = {"view": joined[:, :COLUMNS], "joined": joined}
    grids = read_grids(write(tmp_path / "a.gguf", {"t": (data, Type.Q4_K)}), weights)
    assert list(grids) == ["view"]
    assert_gives(grids["view"], weights["view"])


def test_a_damaged_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"t": (random_tensor(Type.Q4_0), Type.Q4_0)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"a\.gguf is truncated or damaged: .*; fetch it again") as caught:
        read_grids(path, {})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.real
def test_every_matrix_of_a_real_file() -> None:
    path = model_path("smollm2")
    weights = open_checkpoint(str(path)).load(torch.float32).state_dict()
    grids = read_grids(path, weights)
    assert grids.keys() == {name for name, weight in weights.items() if weight.ndim == 2}
    for name, grid in grids.items():
        assert_gives(grid, weights[name])
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name for name, grid in grids.items() if grid.kind == "int8"} == tied  # Q8_0; all others are Q4_1
    assert len({id(grid) for grid in grids.values()}) == len(grids) - 1
