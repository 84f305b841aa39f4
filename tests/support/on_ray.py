"""A Ray cluster of two nodes on this machine, and what a test asks of the server that runs there."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import ray
import yaml
from openai import OpenAI
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.scripts import run as serve_run

from specdec.serve import cli
from specdec.serve.cluster import NAME
from support.gated import SECONDS

MODEL, KEY = "tiny", "a-key"


class OnRay:
    """Two nodes with one processor each; `key_file` has the key that clients give."""

    def __init__(self, address: str, port: int, key_file: Path) -> None:
        self.address, self.port, self.key_file = address, port, key_file
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": KEY, "max_retries": 0, **options})

    def command(self, bundle: Path, *options: str) -> list[str]:
        """Arguments of specdec-serve."""
        return [str(bundle), "--ray", "--ray-address", self.address, "--model", MODEL, "--api-key-file",
                str(self.key_file), "--port", str(self.port), *options]  # fmt: skip

    def deploy(self, bundle: Path, *options: str, **of_engines: Any) -> None:
        """Give what the command prints, edited, to Ray's own command; wait until it runs."""
        printed: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.print", lambda text, **_: printed.append(text))
            assert cli.main(self.command(bundle, "--print-config", *options)) == 0
        config = yaml.safe_load(printed[0])
        config["proxy_location"] = "HeadOnly"  # both nodes have one address here
        config["applications"][0]["deployments"][0] |= of_engines
        file = self.key_file.with_name("serve.yaml")
        file.write_text(yaml.safe_dump(config))
        serve_run.main([str(file), "--non-blocking"], standalone_mode=False)
        until(lambda: self.applications()[NAME] == "RUNNING")

    def applications(self) -> dict[str, str]:
        """States by name."""
        return {name: each.status.value for name, each in serve.status().applications.items()}

    def replicas(self) -> list[dict[str, Any]]:
        """Engines that run."""
        engines = _get_global_client().get_serve_details()["applications"][NAME]["deployments"]["Engine"]["replicas"]
        return [each for each in engines if each["state"] == "RUNNING"]

    def end_an_engine(self) -> None:
        """Let a replica's engine thread end, as it would by a fault of its own."""
        serve.get_deployment_handle("Engine", NAME).options(method_name="__del__").remote().result()

    def metric(self, line: str) -> dict[str, float]:
        """Values of a metric by replica; `line`: its name, and labels that have to be there."""
        name, _, labels = line.partition("{")
        found = {}
        for each in httpx.get(f"{self.url}/metrics").text.splitlines():
            if each.startswith(name + "{") and labels in each:
                found[each.partition('replica="')[2].partition('"')[0]] = float(each.rpartition(" ")[2])
        return found


@contextmanager
def two_nodes(folder: Path) -> Iterator[OnRay]:
    """A cluster while open; a file of keys is written into `folder`. Memory: some 80 MB for objects on each node."""
    port = 20000 + os.getpid() % 9000  # where neither Ray nor the system takes ports for others
    (folder / "keys").write_text(KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: whatever else the machine does would go first
        node = {"num_cpus": 1, "object_store_memory": 80_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            ray.init(cluster.address, log_to_driver=False, namespace="test")
            yield OnRay(cluster.address, port, folder / "keys")
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def until(true: Callable[[], Any]) -> None:
    """Wait for what no event tells."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)
