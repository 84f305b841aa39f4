"""`make engines`: SmolLM2 compiles for a GPU that is not here, and its row counts what the engine holds."""

from pathlib import Path

import pytest

from specdec.engines.manifest import read_manifest
from specdec.tools import engines


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_smollm2_compiles_without_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert engines.main(["--output", str(tmp_path), "--precision", "int4", "--arch", "sm89"]) == 0
    header, row = (line.split() for line in capfd.readouterr().out.splitlines() if "MB" in line or "SmolLM2" in line)
    cells = dict(zip(header, row, strict=True))
    spec = read_manifest(tmp_path / "int4").target.spec
    assert (cells["precision"], cells["architecture"]) == ("int4", "sm89")
    assert (int(cells["KV"]), int(cells["attention"])) == (2 * spec.num_layers, spec.num_layers)
    assert (int(cells["Q"]), int(cells["DQ"])) == (0, 4 * spec.num_layers)  # q/k/v, o, gate/up, down
    assert 60 < float(cells["MB"]) < 200
