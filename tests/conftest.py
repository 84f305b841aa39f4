"""Tests marked `gpu` are skipped, with the reason shown, where there is no NVIDIA GPU."""

import pytest

from specdec.tools import probes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    found = probes.in_subprocess("nvidia", probes.Nvidia)
    if not found.devices:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {found.problem}"))
