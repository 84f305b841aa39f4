"""What `specdec-bench` found, as it is written to JSON, and as a table on a terminal.

Definitions of all figures are part of the report. This module knows fields and words; it measures and computes nothing.
"""

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specdec.engines.costs import PASSES, PAST, PassCost
from specdec.engines.errors import RequestError
from specdec.tools.bench_load import LoadFigures
from specdec.tools.bench_tokens import Sample
from specdec.tools.figures import PEERS, PLAIN, Figures, Run, align
from specdec.tools.intervals import CONFIDENCE, RESAMPLES, Percentiles
from specdec.tools.peers import PeerFailure
from specdec.tools.probes import Cpu, cpu, memory, package_version
from specdec.tools.roofline import Roofline

SCHEMA_VERSION = 1
SHOWN = 5  # positions of a draft in the table; all are in the JSON
PACKAGES = ("specdec", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "tokenizers")

DEFINITIONS = {
    "answers": "answers that the figures are of: every turn of every prompt; of several repeats the fastest one counts",
    "tokens_per_second": "new tokens over the time of decoding, summed over answers; the pass over the prompt is left "
    "out. One at a time: the time of the rounds; batches: wall-clock time less that of the prompts",
    "speedup": "tokens_per_second over that of the fastest plain decoding of the same run and batch size",
    "speedup_interval": f"the middle {100 * CONFIDENCE:.0f} % of {RESAMPLES} bootstrap resamples of the prompts, both "
    "methods on the same ones: what other prompts of this kind would give. It holds no drift of the machine",
    "speedup_peers": "tokens_per_second over that of another runtime in its fastest mode, in turn on the same prompts",
    "predicted_speedup": "what the theory gives for these drafts (Leviathan et al., arXiv:2211.17192): the sum of "
    "(1 - α^(γ+1)) / (1 - α) over the sum of v(γ) + γ c, with v and c measured, in passes of plain decoding. What the "
    "host does, and what a growing context costs, is in the observed speedup alone. Chains, one at a time",
    "mean_accepted_length": "τ: new tokens over rounds, the target's own token included",
    "rounds": "target passes after the prompt",
    "acceptance_rate": "draft tokens accepted over proposed",
    "alpha": "α: chance that a drafted token is kept if all before it were: kept / (kept + rounds that rejected one)",
    "acceptance_by_position": "of the drafts at least 1, 2, ... tokens deep, the share that was kept to there",
    "draft_tokens_accepted": "emitted tokens that a drafter proposed; the others are bonus_tokens, the target's own",
    "ttft_ms": "time to first token, percentiles over answers. One at a time and in batches: from the start of the "
    "prompt's pass; under load: from when the request was due",
    "inter_token_ms": "time between two rounds over the tokens of the later one, once for each of these tokens; "
    "percentiles over tokens",
    "target_ms": "a round's time in the target's engine; draft_ms: in the drafter, its engine and its own work; "
    "host_ms: the rest (packing, sampling, acceptance, text). Means over rounds; rows of a batch share them",
    "time_share": "target, draft and host over their sum",
    "identical_to_plain": "answers with plain decoding's very tokens. Greedy, and with coupled seeds, where a lossless "
    "method in mode exact has to give them all; null for other sampling",
    "peak_memory_bytes": "most resident memory of a process of its own that loads the method and answers the longest "
    "prompt; libraries and mapped weights included",
    "queue_ms": "from when a request was due until it had a row",
    "most_waiting": "most requests without a row, counted when one more came, itself included",
    "latency_ms": "from when a request was due until its answer was read",
    "pass_costs": f"milliseconds of one pass of the target by rows and tokens a row, after {PAST} tokens",
    "roofline": "the least that a pass can take (Williams, Waterman and Patterson, 2009): reading its weights and the "
    "committed keys and values once at the rate at which all threads together read memory, or its tokens at the rate "
    "of a pass as wide as a prompt's, whichever takes longer. Processors' caches may hold a small model's weights",
}


class BundleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which bundle it was. `files`: digest of all hashes of its manifest."""

    name: str
    family: str
    variant: str
    precision: str
    drafters: tuple[str, ...]
    files: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran: no name of a host, no path."""

    cpu: Cpu
    memory_bytes: int | None
    system: str
    python: str
    packages: dict[str, str]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. `prompts`: as the user named the file; `prompts_digest`: of the prompts that were used."""

    prompts: str
    prompts_digest: str
    conversations: int
    turns: str
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    backend: str
    provider: str
    threads: int
    batch_size: tuple[int, ...]
    load: tuple[float, ...]
    warmup: int
    repeat: int


class MethodFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a method was run. `mode`: exact (passes change no bit) or fast."""

    mode: str
    acceptance: str
    least_width: int
    peak_memory_bytes: int | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. `baseline`: the fastest plain decoding, one at a time.

    `peers`: versions of other runtimes. `peer_failures`: what became of modes that did not answer every prompt.
    """

    schema_version: int = SCHEMA_VERSION
    tool: str = "specdec-bench"
    date: str
    bundle: BundleFacts
    machine: Machine
    settings: Settings
    methods: dict[str, MethodFacts] = {}
    peers: dict[str, str] = {}
    peer_failures: tuple[PeerFailure, ...] = ()
    baseline: str | None = None
    figures: tuple[Figures, ...] = ()
    load: tuple[LoadFigures, ...] = ()
    pass_costs: tuple[PassCost, ...] = ()
    roofline: Roofline | None = None
    sample: Sample | None = None
    definitions: dict[str, str] = msgspec.field(default_factory=DEFINITIONS.copy)
    runs: tuple[Run, ...] = ()


def machine() -> Machine:
    """Facts about this machine."""
    return Machine(
        cpu=cpu(),
        memory_bytes=memory().total_bytes,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := package_version(name))},
    )


def to_json(report: Report) -> bytes:
    """The report as an indented JSON object."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """Read what `--json` wrote. Raises `RequestError` when it is not that, or of another version."""
    try:
        raw = path.read_bytes()
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("schema_version")
        if version is None or bytes(version) != str(SCHEMA_VERSION).encode():
            raise RequestError(
                f"{path} is no report of this version of specdec-bench ({importlib.metadata.version('specdec')}): "
                "write it again with --json"
            )
        return msgspec.json.decode(raw, type=Report)
    except OSError as exc:
        raise RequestError(f"{path} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise RequestError(f"{path} is no report of specdec-bench: {exc}; write it again with --json") from exc


def cost_table(costs: Sequence[PassCost], roofline: Roofline | None = None, passes: int = PASSES) -> str:
    """Render pass costs, and the least that they could be, as aligned plain text: a column for each width."""
    rows = [["ms per pass, tokens a row:", *(str(cost.width) for cost in costs if cost.batch == costs[0].batch)]]
    for batch in dict.fromkeys(cost.batch for cost in costs):
        of_batch = [cost for cost in costs if cost.batch == batch]
        rows.append([f"batch {batch}, best of {passes}", *(f"{cost.best_ms:.1f}" for cost in of_batch)])
        rows.append([f"batch {batch}, median", *(f"{cost.median_ms:.1f}" for cost in of_batch)])
        if roofline:
            limits = [roofline.limit_ms(batch, cost.width) for cost in of_batch]
            rows.append([f"batch {batch}, at least", *(f"{limit:.1f}" for limit in limits)])
    return align(rows, left=1)


def table(figures: Sequence[Figures], fastest: str | None) -> str:
    """Render figures as aligned plain text, a block of lines for each batch size and category."""
    peers = [name for name in PEERS if any(name in each.speedup_peers for each in figures)]
    rows = [("prompts", "method", "tokens/s", f"vs {fastest or PLAIN}", "95 %", *(f"vs {name}" for name in peers),
             "predicted", "τ", "accepted", "by position", "ttft ms", "p95", "token ms", "p95", "draft ms/round",
             "host ms/round", f"as {PLAIN}")]  # fmt: skip
    last = None
    for each in figures:
        group = (each.batch_size, each.category)
        batch = f"batch {each.batch_size}, " if each.batch_size > 1 else ""
        span, same = each.speedup_interval, each.identical_to_plain
        rows.append(
            (
                f"{batch}{each.category} ({each.answers})" if group != last else "",
                each.method,
                f"{each.tokens_per_second:.2f}",
                cell(each.speedup, ".3f"),
                f"{span.low:.2f}-{span.high:.2f}" if span else "-",
                *(cell(each.speedup_peers.get(name), ".3f") for name in peers),
                cell(each.predicted_speedup, ".2f"),
                cell(each.mean_accepted_length, ".2f"),
                cell(each.acceptance_rate, ".2f"),
                " ".join(f"{share:.2f}".removeprefix("0") for share in each.acceptance_by_position[:SHOWN]) or "-",
                *_times(each.ttft_ms),
                *_times(each.inter_token_ms),
                cell(each.draft_ms, ".2f"),
                cell(each.host_ms, ".2f"),
                "-" if same is None else f"{same}/{each.answers}",
            )
        )
        last = group
    return align(rows, left=2)


def failure_lines(failures: Sequence[PeerFailure]) -> str:
    """What became of peers that were left out, a line each."""
    return "\n".join(f"{each.name} is left out: {each.message}" for each in failures)


def load_table(load: Sequence[LoadFigures]) -> str:
    """Render figures under load as aligned plain text."""
    rows = [("offered/s", "method", "served/s", "tokens/s", "ttft ms", "p95", "token ms", "p95", "queue ms", "p95",
             "most waiting")]  # fmt: skip
    for each in load:
        times = (*_times(each.ttft_ms), *_times(each.inter_token_ms), *_times(each.queue_ms))
        rows.append(
            (
                f"{each.offered_per_second:g}",
                each.method,
                f"{each.requests_per_second:.2f}",
                f"{each.tokens_per_second:.2f}",
                *times,
                str(each.most_waiting),
            )
        )
    return align(rows, left=2)


def _times(found: Percentiles | None) -> tuple[str, str]:
    return (f"{found.p50:.1f}", f"{found.p95:.1f}") if found else ("-", "-")


def cell(value: float | None, form: str) -> str:
    """A figure in a table, or a dash where there is none."""
    return "-" if value is None else format(value, form)
