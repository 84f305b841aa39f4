"""`AsyncLLM`: the same text for everyone, whoever leaves, lags or fails; and an engine thread that outlives it all."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from specdec.engines.contract import Chunk
from specdec.engines.errors import BusyError, ClosedError, DeadEndError, EngineError, RequestError
from specdec.runtime import LLM, AsyncLLM, Delta, SamplingParams, SpeculativeConfig, Stream
from support.bundles import MAX_LENGTH, shared_bundle
from support.gated import Gate, gated_llm

PROMPTS = [
    "the quick brown fox",
    "one, two, three; one, two, three; one,",
    "d",
    "def add(a, b):\n    return a + b\n\ndef add(",
    "the lazy dog jumps",
    "a target and a draft",
]


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **options})


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(shared_bundle(), speculative=SpeculativeConfig(method=None), verify=False) as llm:
        yield llm


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(gate: Gate) -> Iterator[LLM]:
    """Plain decoding: one token a round, one pass a round, and one for a prompt of more than one token."""
    with gated_llm(shared_bundle(), gate) as llm:
        yield llm


def tokens_of(llm: LLM, prompt: object, **options: object) -> tuple[int, ...]:
    return llm.generate([prompt], params(**options))[0].token_ids


async def text_of(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


async def thread(work: Callable[..., object], *arguments: object) -> None:
    await asyncio.to_thread(work, *arguments)


def is_idle(service: AsyncLLM) -> bool:
    """Whether no row is held anywhere."""
    metrics, scheduler = service.metrics, service._scheduler
    gauges = (metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_bytes)
    return [gauge.value for gauge in gauges] == [0, 0, 0] and not scheduler.busy and scheduler._target.rows == 0


@pytest.mark.parametrize("method", [None, "ngram", "model", "ngram+model"])
def test_requests_at_a_time_get_what_each_gets_alone(plain: LLM, method: str | None) -> None:
    expected = [tokens_of(plain, prompt) for prompt in PROMPTS]

    async def main(llm: LLM) -> None:
        async with AsyncLLM(llm, max_rows=3, prefill_tokens=2) as service:
            outputs = await asyncio.gather(*(service.generate(prompt, params()) for prompt in PROMPTS))
            assert [output.token_ids for output in outputs] == expected
            assert is_idle(service)

    with LLM(shared_bundle(), speculative=SpeculativeConfig(method=method), verify=False) as llm:
        asyncio.run(main(llm))


def test_deltas_add_up_to_the_output(plain: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(plain) as service:
            streams = [service.submit(prompt, params(logprobs=1)) for prompt in PROMPTS]
            for prompt, deltas in zip(PROMPTS, await asyncio.gather(*map(text_of, streams)), strict=True):
                output = deltas[-1].output
                assert output is not None
                assert [delta.output for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
                assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
                assert "".join(delta.text for delta in deltas) == output.text
                assert sum((delta.token_ids for delta in deltas), ()) == output.token_ids == tokens_of(plain, prompt)
                assert output.logprobs is not None
                assert len(output.logprobs) == 24
                assert sum((delta.logprobs for delta in deltas), ()) == output.logprobs
                assert sum((delta.origins for delta in deltas), ()) == output.origins == ("plain",) * 24
                assert [len(delta.ends) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
                assert output.ends[-1] == len(output.text)
                assert list(output.ends) == sorted(output.ends)
            assert len({stream.request_id for stream in streams}) == len(PROMPTS)
            assert (await streams[0].result()).token_ids == tokens_of(plain, PROMPTS[0]), "read to its end before"

    asyncio.run(main())


def test_a_reader_that_lags_gets_what_it_missed_in_one_delta(gated: LLM, gate: Gate, plain: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(gated) as service:
            gate.close()
            lagging, prompt = service.submit([40], params()), service.submit([41], params())
            await thread(gate.arrive)
            await thread(gate.let, 2)
            first, _ = await anext(lagging), await anext(prompt)
            for _ in range(7):
                await thread(gate.let, 1)
                assert len((await anext(prompt)).token_ids) == 1
            second = await anext(lagging)
            gate.open()
            assert await service.drain()
            last = await anext(lagging)
            assert [len(delta.token_ids) for delta in (first, second, last)] == [2, 7, 24 - 9]
            assert second.output is None
            assert last.output is not None
            assert first.text + second.text + last.text == last.output.text
            assert (*first.token_ids, *second.token_ids, *last.token_ids) == tokens_of(plain, [40])
            with pytest.raises(StopAsyncIteration):
                await anext(lagging)
            assert (await prompt.result()).token_ids == tokens_of(plain, [41])

    asyncio.run(main())


def test_a_reader_that_was_woken_is_not_woken_again(gated: LLM, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncLLM(gated) as service:
            loop, wakes = asyncio.get_running_loop(), []
            call = loop.call_soon_threadsafe

            def counting(callback: Callable[..., object], *arguments: object, **options: object) -> object:
                wakes.append(callback.__name__)
                return call(callback, *arguments, **options)

            gate.close()
            stream = service.submit([40], params())
            reader = asyncio.create_task(anext(stream))
            await thread(gate.arrive)
            loop.call_soon_threadsafe = counting  # type: ignore[method-assign,assignment]
            gate.let(3)  # the loop stands still for three rounds
            assert wakes == ["_release"]
            assert len((await reader).token_ids) == 3
            gate.open()

    asyncio.run(main())


def test_one_task_reads_a_stream(gated: LLM, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncLLM(gated) as service:
            gate.close()
            stream = service.submit([40], params())
            reader = asyncio.create_task(stream.result())
            await thread(gate.arrive)
            with pytest.raises(RequestError, match="another task reads this stream already: let one task read it"):
                await anext(stream)
            gate.open()
            assert (await reader).finish_reason == "length"

    asyncio.run(main())


async def leave_by_cancel(stream: Stream) -> None:
    stream.cancel()
    stream.cancel()
    output = await stream.result()
    assert output.finish_reason == "abort"


async def leave_the_block(stream: Stream) -> None:
    async with stream:
        async for _ in stream:
            break


async def leave_a_generator(stream: Stream) -> None:
    async def texts() -> object:
        async with stream:
            async for delta in stream:
                yield delta.text

    generator = texts()
    await anext(generator)
    await generator.aclose()


async def leave_by_aclose(stream: Stream) -> None:
    await stream.aclose()


@pytest.mark.parametrize("leave", [leave_by_cancel, leave_the_block, leave_a_generator, leave_by_aclose])
def test_who_leaves_frees_the_row_and_disturbs_nobody(
    gated: LLM, gate: Gate, plain: LLM, leave: Callable[[Stream], Awaitable[None]]
) -> None:
    """Two rows, three requests: the third one gets the row of the one that left."""

    async def main() -> None:
        async with AsyncLLM(gated, max_rows=2) as service:
            gate.close()
            leaving, staying, waiting = (service.submit([40 + i], params(max_new_tokens=400)) for i in range(3))
            await thread(gate.arrive)
            await thread(gate.let, 3)
            assert [service.metrics.num_requests_running.value, service.metrics.num_requests_waiting.value] == [2, 1]
            task = asyncio.create_task(leave(leaving))
            await asyncio.sleep(0)
            gate.open()
            await task
            for i, stream in ((1, staying), (2, waiting)):
                assert (await stream.result()).token_ids == tokens_of(plain, [40 + i], max_new_tokens=400)
            last = await leaving.result()
            assert last.finish_reason == "abort"
            assert last.token_ids == tokens_of(plain, [40], max_new_tokens=400)[:4], (
                "the round that had begun is its last"
            )
            assert service.metrics.request_success_total.value(of="abort") == 1
            assert service.metrics.request_success_total.value(of="length") == 2
            assert is_idle(service)

    asyncio.run(main())


def test_a_request_that_waits_can_be_cancelled(gated: LLM, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncLLM(gated, max_rows=1) as service:
            gate.close()
            running, waiting = service.submit("a", params()), service.submit("b", params())
            await thread(gate.arrive)
            waiting.cancel()
            await thread(gate.let, 2)  # it ends with the next round
            output = await waiting.result()
            assert (output.finish_reason, output.token_ids, output.text) == ("abort", (), "")
            gate.open()
            assert (await running.result()).finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_cancelling_the_task_cancels_the_request(gated: LLM, gate: Gate, plain: LLM, how: str) -> None:
    async def main() -> None:
        async with AsyncLLM(gated) as service:
            gate.close()
            stream = service.submit("a", params()) if how == "stream" else None  # kept: it is not dropped
            work = stream.result() if stream else service.generate("a", params())
            task, other = asyncio.create_task(work), asyncio.create_task(service.generate("b", params()))
            await thread(gate.arrive)
            await thread(gate.let, 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            assert (await other).token_ids == tokens_of(plain, "b")
            assert await service.drain()
            assert service.metrics.request_success_total.value(of="abort") == 1
            assert is_idle(service)

    asyncio.run(main())


@pytest.mark.parametrize("read", [False, True])
def test_a_stream_that_is_dropped_cancels_its_request(gated: LLM, gate: Gate, read: bool) -> None:
    async def main() -> None:
        async with AsyncLLM(gated) as service:
            gate.close()
            stream = service.submit("a", params())
            await thread(gate.arrive)
            if read:
                await thread(gate.let, 1)
                async for _ in stream:
                    break
            del stream
            gc.collect()
            gate.open()
            assert await service.drain()
            assert service.metrics.request_success_total.value(of="abort") == 1
            assert is_idle(service)

    asyncio.run(main())


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(gated: LLM, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncLLM(gated, max_rows=1, most_waiting=2) as service:
            gate.close()
            running = service.submit("a", params())
            await thread(gate.arrive)
            waiting = [service.submit("b", params()) for _ in range(2)]
            with pytest.raises(BusyError, match="2 requests wait already: try again later"):
                service.submit("c", params())
            with pytest.raises(BusyError):
                await service.generate("c", params())
            gate.open()
            outputs = [await stream.result() for stream in (running, *waiting)]
            assert [output.finish_reason for output in outputs] == ["length"] * 3
            assert (await service.generate("c", params())).finish_reason == "length"

    asyncio.run(main())


def test_what_can_never_fit_is_refused_and_what_fits_alone_waits(plain: LLM) -> None:
    """128 slots are 2 layers x (key, value) x 2 heads x 16 floats each: 64 KiB a row; 64 are spare for a tree."""

    async def main() -> None:
        async with AsyncLLM(plain, kv_bytes=2 * 65536) as service:
            with pytest.raises(RequestError, match=r"1 tokens and up to 192 new ones need 0.2 MiB of cache"):
                service.submit([40], params(max_new_tokens=192))
            large = service.submit([40], params(max_new_tokens=191))  # 192 + 64 slots: all of it
            small = [service.submit([41 + i], params(max_new_tokens=20)) for i in range(3)]  # 128 slots: half of it
            outputs = [await stream.result() for stream in (large, *small)]
            assert [len(output.token_ids) for output in outputs] == [191, 20, 20, 20]
            assert outputs[1].token_ids == tokens_of(plain, [41], max_new_tokens=20)
            assert is_idle(service)

    asyncio.run(main())


@pytest.mark.parametrize("method", [None, "ngram", "model", "ngram+model"])
def test_the_budget_counts_the_cache_of_a_draft_that_has_one(method: str | None, gate: Gate) -> None:
    caches = 2 if method in ("model", "ngram+model") else 1

    async def main(llm: LLM) -> None:
        async with AsyncLLM(llm, max_rows=2, kv_bytes=8 * 65536) as service:
            gate.close()
            streams = [service.submit([40 + i], params(max_new_tokens=20)) for i in range(2)]
            await thread(gate.arrive)
            while service.metrics.num_requests_running.value < 2:
                await thread(gate.let, 1)
            assert service.metrics.kv_cache_bytes.value == caches * 2 * 65536
            assert service.metrics.kv_cache_usage_perc.value == caches * 2 / 8
            gate.open()
            for stream in streams:
                await stream.result()
            assert service.metrics.kv_cache_usage_perc.value == 0
        async with AsyncLLM(llm, max_rows=2) as service:
            assert service._budget.limit == caches * 2 * 12 * 65536, "1024 + 64 slots, up to whole 512"

    with gated_llm(shared_bundle(), gate, method) as llm:
        asyncio.run(main(llm))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([320], {}, "token id 320 is outside the vocabulary"),
        ([1] * MAX_LENGTH, {}, "at most 1023 fit"),
        ("a", {"logprobs": 321}, "logprobs 321 exceeds the vocabulary"),
    ],
)
def test_an_invalid_request_raises_where_it_is_made(plain: LLM, prompt: object, options: dict, message: str) -> None:
    async def main() -> None:
        async with AsyncLLM(plain) as service:
            with pytest.raises(RequestError, match=message):
                service.submit(prompt, params(**options))
            assert is_idle(service)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 9}, "max_rows must be from 1 to this bundle's 8, not 9"),
        ({"max_rows": 0}, "max_rows must be from 1 to"),
        ({"most_waiting": 0}, "most_waiting must be at least 1, not 0"),
        ({"kv_bytes": 0}, "kv_bytes must be at least 1, not 0"),
        ({"prefill_tokens": 0}, "prefill_tokens must be at least 1, not 0"),
    ],
)
def test_numbers_out_of_range_are_refused(plain: LLM, options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        AsyncLLM(plain, **options)


def test_an_error_of_one_request_is_its_own(plain: LLM) -> None:
    dead = params(allowed_token_ids=(40,), bad_words=((40,),))

    async def main() -> None:
        async with AsyncLLM(plain) as service:
            wrong, right = service.submit("a", dead), service.submit("b", params())
            for _ in range(2):
                with pytest.raises(DeadEndError, match="no token is possible after 0 generated ones"):
                    await anext(wrong)
            with pytest.raises(DeadEndError):
                await wrong.result()
            with pytest.raises(DeadEndError):
                await service.generate("a", dead)
            assert (await right.result()).token_ids == tokens_of(plain, "b")
            assert service.metrics.request_success_total.value(of="error") == 2
            assert is_idle(service)

    asyncio.run(main())


def test_an_error_of_the_engine_ends_those_of_its_pass_alone(gated: LLM, gate: Gate, plain: LLM) -> None:
    def fault(chunk: Chunk) -> None:
        if chunk.past_lens.max() == 5:
            gate.fault = None
            raise EngineError("the device is lost")

    async def main() -> None:
        gate.fault = fault
        async with AsyncLLM(gated, max_rows=2) as service:
            gate.close()
            streams = [service.submit([40 + i], params()) for i in range(3)]
            await thread(gate.arrive)
            await thread(gate.let, 1)
            gate.open()
            for stream in streams[:2]:
                with pytest.raises(EngineError, match="the device is lost"):
                    await stream.result()
            assert (await streams[2].result()).token_ids == tokens_of(plain, [42]), "it waited"
            assert (await service.generate([40], params())).token_ids == tokens_of(plain, [40])
            assert service.metrics.request_success_total.value(of="error") == 2
            assert is_idle(service)

    asyncio.run(main())


def test_an_error_nobody_foresaw_ends_all_and_later_requests_succeed(
    gated: LLM, gate: Gate, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = ZeroDivisionError("a fault of ours")

    def step() -> None:
        raise cause

    async def main() -> None:
        async with AsyncLLM(gated, max_rows=1) as service:
            gate.close()
            running, waiting = service.submit([40], params()), service.submit([41], params())
            await thread(gate.arrive)
            broken = service._scheduler
            monkeypatch.setattr(broken, "step", step)
            gate.open()
            assert len((await anext(running)).token_ids) == 1
            for stream in (running, waiting):
                with pytest.raises(EngineError, match="ZeroDivisionError: a fault of ours") as error:
                    await stream.result()
                assert error.value.__cause__ is cause
            assert service._thread.is_alive()
            assert service._scheduler is not broken
            assert (await service.generate([42], params())).token_ids == tokens_of(plain, [42])
            assert service.metrics.request_success_total.value(of="error") == 2
            assert is_idle(service)

    asyncio.run(main())


def test_an_error_while_answers_are_handed_out_leaves_nobody_waiting(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends in the round whose answer cannot be handed out."""

    def since(row: object, known: int) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a fault of ours")

    async def main() -> None:
        async with AsyncLLM(plain) as service:
            monkeypatch.setattr(Delta, "since", since)
            with pytest.raises(EngineError, match="ZeroDivisionError: a fault of ours"):
                await service.generate([40], params(max_new_tokens=1))
            assert (await service.generate([41], params())).token_ids == tokens_of(plain, [41])
            assert service.metrics.request_success_total.value(of="error") == 1
            assert service.metrics.request_success_total.value(of="length") == 1

    asyncio.run(main())


def test_draining_ends_what_runs_and_takes_no_more(gated: LLM, gate: Gate) -> None:
    async def main() -> None:
        async with AsyncLLM(gated, max_rows=1) as service:
            gate.close()
            streams = [service.submit([40 + i], params()) for i in range(2)]
            await thread(gate.arrive)
            assert not await service.drain(timeout=0)
            assert service._drained[0].cancelled()
            with pytest.raises(ClosedError, match="this AsyncLLM is being drained"):
                service.submit("a", params())
            both = asyncio.gather(service.drain(), service.drain(timeout=200))
            gate.open()
            assert await both == [True, True]
            assert [(await stream.result()).finish_reason for stream in streams] == ["length"] * 2
            assert await service.drain()
            assert await service.drain(timeout=0)

    asyncio.run(main())


def test_closing_aborts_what_is_left_and_ends_the_thread(gated: LLM, gate: Gate) -> None:
    async def main() -> None:
        service = AsyncLLM(gated, max_rows=1)
        gate.close()
        running, waiting = service.submit([40], params()), service.submit([41], params())
        await thread(gate.arrive)
        await thread(gate.let, 2)
        reader = asyncio.create_task(waiting.result())
        closing = [asyncio.create_task(service.aclose()) for _ in range(2)]
        await asyncio.sleep(0)  # both wait for the round to end, and the loop goes on
        assert not any(task.done() for task in closing)
        with pytest.raises(ClosedError, match="this AsyncLLM is closed: make another one"):
            service.submit("a", params())
        gate.open()
        await asyncio.gather(*closing)
        assert not service._thread.is_alive()
        assert (await reader).finish_reason == "abort"
        output = await running.result()
        assert (output.finish_reason, len(output.token_ids)) == ("abort", 3)
        await service.aclose()
        assert await service.drain()
        with pytest.raises(ClosedError, match="closed"):
            await service.generate("a", params())
        assert is_idle(service)

    asyncio.run(main())


def test_the_thread_is_named_and_sleeps_without_requests(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncLLM(plain) as service:
            assert (service._thread.name, service._thread.daemon) == ("specdec-engine", True)
            await service.generate("a", params(max_new_tokens=3))
            rounds: list[None] = []
            step = service._scheduler.step
            monkeypatch.setattr(service._scheduler, "step", lambda: (rounds.append(None), step())[1])
            await service.generate([40], params(max_new_tokens=3))
            assert len(rounds) == 3

    asyncio.run(main())


def test_two_loops_and_a_thread_without_one_share_a_service(plain: LLM) -> None:
    expected = {prompt: tokens_of(plain, prompt) for prompt in PROMPTS}
    got: dict[str, tuple[int, ...]] = {}
    service = AsyncLLM(plain, max_rows=3)
    early = service.submit(PROMPTS[0], params())  # read on a loop later

    async def ask(prompts: list[str]) -> None:
        outputs = await asyncio.gather(*(service.generate(prompt, params()) for prompt in prompts))
        got.update(zip(prompts, (output.token_ids for output in outputs), strict=True))

    loops = [threading.Thread(target=asyncio.run, args=(ask(part),)) for part in (PROMPTS[1:4], PROMPTS[4:])]
    for one in loops:
        one.start()
    for one in loops:
        one.join()

    async def main() -> None:
        got[PROMPTS[0]] = (await early.result()).token_ids
        await service.aclose()

    asyncio.run(main())
    assert got == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the task that is never ended
@pytest.mark.parametrize("waiting", [False, True], ids=["nobody reads", "a task reads"])
def test_a_loop_that_is_closed_takes_its_requests_with_it(gated: LLM, gate: Gate, plain: LLM, waiting: bool) -> None:
    service, loop = AsyncLLM(gated), asyncio.new_event_loop()
    tasks: list[asyncio.Task[Delta]] = []
    gate.close()

    async def begin() -> Stream:
        stream = service.submit([40], params())
        await thread(gate.arrive)
        if waiting:
            tasks.append(asyncio.create_task(anext(stream)))
            await asyncio.sleep(0)
        return stream

    stream = loop.run_until_complete(begin())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()

    async def main() -> None:
        gate.open()
        assert await service.drain()
        assert service.metrics.request_success_total.value(of="abort") == 1
        assert service.metrics.generation_tokens_total.value() < 24
        assert service._thread.is_alive()
        assert is_idle(service)
        await service.aclose()

    asyncio.run(main())
    assert stream._mailbox.output is not None


def test_the_thread_lives_on_after_a_closed_loop(gated: LLM, gate: Gate, plain: LLM) -> None:
    service = AsyncLLM(gated)

    async def begin() -> Stream:
        return service.submit([40], params(max_new_tokens=900))

    abandoned = asyncio.run(begin())

    async def main() -> None:
        assert (await service.generate([41], params())).token_ids == tokens_of(plain, [41])
        assert (await abandoned.result()).finish_reason == "abort"
        await service.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("method", [None, "model"])
def test_metrics_add_up_with_the_requests_own_statistics(method: str | None) -> None:
    async def main(llm: LLM) -> None:
        async with AsyncLLM(llm, max_rows=2) as service:
            each = [params(max_new_tokens=3 + 4 * i) for i in range(len(PROMPTS))]
            outputs = await asyncio.gather(*map(service.generate, PROMPTS, each))
            stats, metrics = [output.stats for output in outputs], service.metrics
            for counter, name in (
                (metrics.prompt_tokens_total, "prompt_tokens"),
                (metrics.generation_tokens_total, "new_tokens"),
                (metrics.rounds_total, "rounds"),
                (metrics.spec_decode_num_draft_tokens_total, "draft_tokens_proposed"),
                (metrics.spec_decode_num_accepted_tokens_total, "draft_tokens_accepted"),
            ):
                assert counter.value() == sum(getattr(one, name) for one in stats), name
            assert metrics.request_success_total.value(of="length") == len(PROMPTS)
            for histogram, values in (
                (metrics.request_queue_time_seconds, [one.queue_ms / 1000 for one in stats]),
                (metrics.time_to_first_token_seconds, [one.ttft_ms / 1000 for one in stats]),
                (metrics.request_mean_accepted_length, [one.mean_accepted_length for one in stats]),
            ):
                assert histogram.count == len(PROMPTS)
                assert histogram.sum == pytest.approx(sum(values), rel=1e-12)
            assert all(0 < one.queue_ms < one.ttft_ms for one in stats)
            gaps, whole = metrics.inter_token_latency_seconds, metrics.e2e_request_latency_seconds
            firsts = [min(one.new_tokens, 4 if method else 1) for one in stats]  # the target is its own draft
            assert gaps.count == sum(one.new_tokens for one in stats) - sum(firsts)
            assert whole.count == len(PROMPTS)
            assert whole.sum > metrics.time_to_first_token_seconds.sum + gaps.sum, "rounds end after their tokens"

    config = SpeculativeConfig(method=method, num_speculative_tokens=3)
    with LLM(shared_bundle(), speculative=config, verify=False) as llm:
        asyncio.run(main(llm))
