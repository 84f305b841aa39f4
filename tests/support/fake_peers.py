"""A stand-in for the Python that has onnxruntime-genai: speaks the driver's protocol, knows no model."""

import sys
from pathlib import Path

# Checks its arguments; answers with the prompt's tokens over and over; ends at a prompt that begins with token 0.
SCRIPT = """#!{python}
import json, sys
assert sys.argv[1] == "-c" and sys.argv[3:] == ["folder", "1"], sys.argv
print("a library says hello", flush=True)
print(json.dumps({{"version": "9.9"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["prompt"][0] == 0:
        print("first line", file=sys.stderr)
        sys.exit("no such token")
    tokens = (request["prompt"] * request["count"])[: request["count"]]
    print(json.dumps({{"token_ids": tokens, "seconds": 0.5}}), flush=True)
"""


def fake_genai_python(folder: Path) -> str:
    """Write the script to `folder`; it takes the model `folder` and 1 thread. Returns its path."""
    path = folder / "python"
    path.write_text(SCRIPT.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)
