"""A report of `specdec-bench` that nobody measured: every part is there, times are round, texts hostile to HTML."""

from typing import Any

from specdec.engines.costs import PassCost
from specdec.runtime.request import Round
from specdec.tools.bench_load import LoadFigures
from specdec.tools.bench_report import BundleFacts, MethodFacts, Report, Settings, machine
from specdec.tools.bench_tokens import Sample, marked
from specdec.tools.figures import Answer, Costs, Run, summarize
from specdec.tools.intervals import Percentiles
from specdec.tools.roofline import Roofline

EVIL = "</style><script src='http://example.org/x.js'>alert(1)</script>\x00\x1b[0m & \ufffe \ud800 <b>"


def a_run(method: str, unit: int, batch: int, seconds: float, history: tuple[Round, ...]) -> Run:
    tokens = tuple(range(sum(each.kept + 1 for each in history)))
    answer = Answer(
        question_id=unit,
        token_ids=tokens,
        decoded=len(tokens),
        ttft_ms=5.0,
        target_ms=8.0 * len(history),
        draft_ms=2.0 * (method != "plain"),
        host_ms=1.0,
        history=history,
        draft_tokens_proposed=sum(each.depth for each in history),
        draft_tokens_accepted=sum(each.kept for each in history),
    )
    category = ("qa", "rag", EVIL)[unit % 3] if batch == 1 else "all"
    return Run(method=method, batch_size=batch, unit=unit, category=category, seconds=seconds, answers=(answer,))


def a_report(**changes: Any) -> Report:
    plain = tuple(Round(0, 0, 10.0 * at) for at in range(1, 13))
    drafted = tuple(Round(3, at % 4, 11.0 * at) for at in range(1, 6))  # 1, 2, 3, 0 and 1 of 3 are kept: 12 tokens
    runs = []
    for batch in (1, 4):
        for unit in range(6):
            runs.append(a_run("plain", unit, batch, 1.0, plain))
            runs += [a_run(name, unit, batch, 0.5 + 0.01 * unit, drafted) for name in ("ngram", EVIL)]
    costs = Costs(pass_ms={1: 10.0, 4: 12.0, 8: 20.0}, least={"plain": 1, "ngram": 1})
    few = Percentiles(1.0, 2.0, 3.0)
    load = LoadFigures(
        method="ngram",
        offered_per_second=2.0,
        requests=6,
        rows=4,
        seconds=3.0,
        requests_per_second=2.0,
        tokens_per_second=24.0,
        ttft_ms=few,
        inter_token_ms=few,
        queue_ms=few,
        latency_ms=few,
        most_waiting=2,
    )
    settings = Settings(
        prompts=EVIL,
        prompts_digest="0" * 16,
        conversations=6,
        turns="first",
        max_new_tokens=12,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        backend="ort",
        provider="cpu",
        threads=1,
        batch_size=(1, 4),
        load=(2.0,),
        warmup=1,
        repeat=1,
    )
    how = MethodFacts(mode="exact", acceptance="greedy", least_width=1, peak_memory_bytes=2**27)
    fields: dict[str, Any] = {
        "date": "2000-01-01",
        "bundle": BundleFacts(name="tiny", family="llama", variant="fp32", precision="fp32", drafters=("ngram",),
                              files="f" * 16),
        "machine": machine(),
        "settings": settings,
        "methods": {"plain": how, "ngram": how, EVIL: how},
        "peers": {"llama-cpp": "8.8"},
        "baseline": "plain",
        "figures": tuple(summarize(runs, costs=costs)),
        "load": (load,),
        "roofline": Roofline(bytes_per_second=2e10, weight_bytes=150_000_000, slot_bytes=46_080, token_ms=0.75),
        "pass_costs": (PassCost(1, 1, 9.0, 10.0), PassCost(1, 4, 11.0, 12.0), PassCost(4, 1, 11.0, 12.0),
                       PassCost(4, 4, 31.0, 32.0)),
        "sample": Sample(method="ngram", question_id=1, category="qa", prompt=EVIL, accepted_length=2.4,
                         rounds=marked(drafted, ["the ", EVIL, "\n\n", *"123456789"])),
        "runs": tuple(runs),
    }  # fmt: skip
    return Report(**fields | changes)
