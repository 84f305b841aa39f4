"""What drives a peer: a table row with the source that runs in the peer's own Python, and how it is set up and asked.

Nothing of a peer is imported here or in the modules that hold the rows. How processes are started, where environments
and models lie, and what the answers are worth is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PLAIN = "plain"

# Keywords of a driver's `generate`; none: plain decoding.
Mode = Mapping[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class Driver:
    """How to drive one peer: `source` runs in its Python with a model, a number of threads, and a draft model or "".

    It defines `version`, `generate` and `score`, and `LOOP` follows it. `generate(prompt, count, **mode)` makes exactly
    `count` greedy tokens after a prompt, end tokens or not, and returns them, how many of them the prompt's pass gave,
    and the seconds of the others, whose passes alone are timed. `score(tokens)` returns the logits after every token,
    [L, V], or None where the peer does not give them.

    `requirements` are what pip installs, pinned. `converter` runs in the same Python with a source, a place for the
    result, and a precision of `precisions`; "" means that the folder of `checkpoint` is the model. `reads_gguf` tells
    whether it takes a GGUF file itself, `reads_folders` a Hugging Face folder; a GGUF file becomes one for those that
    do not. `modes` are tried in turn; `draft_modes`, too, where there is a draft model.
    """

    name: str
    title: str
    source: str
    requirements: tuple[str, ...] = ()
    converter: str = ""
    precisions: tuple[str, ...] = ()
    reads_gguf: bool = False
    reads_folders: bool = True
    modes: Mapping[str, Mode] = field(default_factory=lambda: {PLAIN: {}})
    draft_modes: Mapping[str, Mode] = field(default_factory=dict)

    @property
    def all_modes(self) -> dict[str, Mode]:
        """Modes by name, those that need a draft model last."""
        return {**self.modes, **self.draft_modes}


LOOP = """
print(json.dumps({"version": version}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "path" in request:
        logits = score(request["tokens"])
        if logits is not None:
            logits = numpy.asarray(logits, numpy.float32)
            numpy.save(request["path"], logits)
        answer = {"shape": () if logits is None else logits.shape}
    else:
        tokens, first, seconds = generate(request["tokens"], request["count"], **request["mode"])
        answer = {"token_ids": tokens, "first": first, "seconds": seconds}
    print(json.dumps(answer), flush=True)
"""
