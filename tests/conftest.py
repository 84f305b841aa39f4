"""Tests marked `gpu` are skipped, with the reason shown, where there is no NVIDIA GPU; Hypothesis looks at no clock."""

import hypothesis
import pytest

from specdec.tools import probes

# A busy machine is no fault of what is tested.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    found = probes.in_subprocess("nvidia", probes.Nvidia)
    if not found.devices:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {found.problem}"))
