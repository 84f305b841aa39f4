"""The server against its own schema: schemathesis sends what that allows and what it forbids, and reads the answers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx

from specdec.runtime import LLM, SpeculativeConfig
from support.bundles import shared_bundle
from support.gated import SECONDS
from support.served import MODEL, served

# A schema cannot say what the model takes, nor what several fields may not be together: such requests are refused too.
EXCLUDED = "positive_data_acceptance"


def test_answers_are_those_of_the_schema(tmp_path: Path) -> None:
    """Statuses, bodies, headers, methods, keys; and nothing that a client sends makes the server fail."""
    speculative = SpeculativeConfig(method="ngram")
    with (
        LLM(shared_bundle(), speculative=speculative, verify=False) as llm,
        served(llm, api_keys=("secret",), max_tokens=4) as server,
    ):
        schema = httpx.get(f"{server.url}/openapi.json").json()
        parts, vocabulary = schema["components"]["schemas"], llm.manifest.target.spec.vocab_size
        for body in (parts["ChatRequest"], parts["CompletionRequest"]):
            body["properties"]["model"] = {"const": MODEL}  # another one is a 404, and tests nothing else
        file = tmp_path / "openapi.json"
        file.write_text(re.sub(rf"\b{2**31}\b", str(vocabulary), json.dumps(schema)))
        fuzz = [sys.executable, "-m", "schemathesis.cli", "run", file, "--url", server.url, "--header",
                "Authorization: Bearer secret", "--checks", "all", "--exclude-checks", EXCLUDED, "--max-examples", "20",
                "--generation-deterministic", "--no-color"]  # fmt: skip
        done = subprocess.run(fuzz, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stdout
        counted = httpx.get(f"{server.url}/metrics").text
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
            assert f'path="{path}",status="200"' in counted, "or nothing was tested"
        assert 'status="500"' not in counted
        assert server.client(api_key="secret").models.list().data[0].id == MODEL
