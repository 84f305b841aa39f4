"""What `--ray` makes of the command's options, and what tells conversations apart: all that needs no cluster."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from specdec.engines.errors import BundleError, RequestError
from specdec.serve import cli
from specdec.serve.conversation import conversation_key
from support.bundles import shared_bundle

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'specdec[ray]'")


def chat(*contents: str, **fields: Any) -> bytes:
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return json.dumps(
        {"model": "tiny", "messages": [{"role": "system", "content": "count"}, *turns], **fields}
    ).encode()


def test_all_turns_of_a_conversation_have_one_key() -> None:
    first = conversation_key(chat("one"))
    assert first
    assert conversation_key(chat("one", "two", "three", seed=1)) == first
    assert conversation_key(chat("two")) != first
    prompt = "the quick brown fox " * 20
    keys = [
        conversation_key(json.dumps({"prompt": text}).encode()) for text in (prompt, prompt + "jumps", "x" + prompt)
    ]
    assert keys[0] == keys[1] != keys[2]
    assert [conversation_key(body) for body in (b"", b"{", b"[]", b'{"messages": 1}', b"\xff", b"{}")] == [""] * 6


def arguments(**changes: Any) -> dict[str, Any]:
    return {"bundle": str(shared_bundle()), "no_auth": True, **changes}


@needs_ray
def test_arguments_are_the_commands_options() -> None:
    from specdec.serve.cluster import arguments_of, parsed

    given = arguments(method="ngram", threads=3, replicas="1-4", max_queue=7, deadline_seconds=2.5)
    args = parsed(given)
    assert (args.method, args.threads, tuple(args.replicas), args.max_queue) == ("ngram", 3, (1, 4), 7)
    assert given.items() <= arguments_of(args).items()
    assert parsed(arguments_of(args)) == args
    assert parsed({**given, "replicas": 2, "model": None}).replicas == (2, 2)


@needs_ray
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"colour": "red"}, "there is no argument 'colour'"),
        ({"port": 1}, "there is no argument 'port': it belongs into http_options"),
        ({"threads": True}, "the argument threads is True: give a value"),
        ({"fast": "yes"}, "the argument fast is 'yes': give true or false"),
        ({"replicas": "4-1"}, "'4-1' has its ends the wrong way round"),
        ({"max_queue": "many"}, "argument --max-queue: invalid int value: 'many'"),
        ({"max_queue": 0}, "max_queue must be at least 1, not 0"),
        ({"no_auth": False}, "on a cluster the server needs keys"),
        ({"bundle": None}, "the argument bundle is missing"),
    ],
)
def test_arguments_that_are_wrong_are_refused_before_anything_starts(changes: dict[str, Any], told: str) -> None:
    from specdec.serve.ray import build_app

    with pytest.raises(RequestError, match=told):
        build_app(arguments(**changes))
    with pytest.raises(BundleError):
        build_app(arguments(bundle="/nowhere"))


@needs_ray
def test_the_file_for_serve_deploy_has_paths_of_files_and_no_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_API_KEYS", "secret")
    assert cli.main([str(shared_bundle()), "--ray", "--replicas", "1-4", "--threads", "2", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "secret" not in printed
    (application,) = yaml.safe_load(printed)["applications"]
    assert application["args"]["replicas"] == "1-4"
    assert application["args"]["bundle"] == str(shared_bundle())
    assert application["deployments"] == [{"name": "Engine", "ray_actor_options": {"num_cpus": 2}}]


def test_options_of_a_cluster_are_refused_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bundle", "--replicas", "2"])
    assert "--replicas is for --ray: give both" in capsys.readouterr().err


def test_the_command_loads_ray_only_when_it_is_asked_for() -> None:
    seen = "import sys, specdec.serve.cli, specdec.serve, specdec.serve.server; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True).stdout == "False\n"
