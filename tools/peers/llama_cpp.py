"""llama.cpp through llama-cpp-python: its driver, its quantizer, and the prompt lookup of the Python package.

Runs in no process of ours. The package's only drafter is prompt lookup; a draft model would be ours, not the peer's.
"""

from specdec.tools.peers.driver import PLAIN, Driver

# An end token is a token like any other. `llama_decode` and numpy's argmax take less time than `Llama.generate`,
# `Llama.eval` and the library's greedy sampler (0.2 of 13 ms a token with SmolLM2-135M in Q8_0); flash attention, which
# `Llama` leaves off, takes more. Prompt lookup exists in `Llama.generate` alone, and fails on prompts longer than a
# batch unless the context keeps the logits of all tokens.
SOURCE = """
import itertools, json, sys, time
import llama_cpp, numpy

held = {}

def loaded(size, every):
    llm = held.get(every)
    if llm is None or llm.n_ctx() < size:
        if llm is not None:
            llm.close()
        threads, size = int(sys.argv[2]), -(-size // 256) * 256
        llm = held[every] = llama_cpp.Llama(sys.argv[1], n_ctx=size, n_threads=threads, n_threads_batch=threads,
                                            logits_all=every, verbose=False)
    llm.reset()
    return llm

def generate(prompt, count, lookup=0, ngram=0):
    if lookup:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
        llm = loaded(len(prompt) + count + lookup, True)
        llm.draft_model = LlamaPromptLookupDecoding(max_ngram_size=ngram, num_pred_tokens=lookup)
        answer = llm.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        tokens = [int(next(answer))]
        started = time.perf_counter()
        tokens += [int(token) for token in itertools.islice(answer, count - 1)]
        return tokens, 1, time.perf_counter() - started
    llm = loaded(len(prompt) + count, False)
    llm.eval(prompt)
    last = (llama_cpp.llama_token * 1)()
    batch = llama_cpp.llama_batch_get_one(last, 1)
    shape = (llm.n_vocab(),)

    def best():
        return int(numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape).argmax())

    tokens = [best()]
    started = time.perf_counter()
    for _ in range(count - 1):
        last[0] = tokens[-1]
        if llama_cpp.llama_decode(llm.ctx, batch):
            raise RuntimeError("llama_decode failed")
        tokens.append(best())
    return tokens, 1, time.perf_counter() - started

def score(tokens):
    llm = loaded(len(tokens), True)
    llm.eval(tokens)
    return llm.scores[:len(tokens)]

loaded(1, False)
version = llama_cpp.__version__
"""

# A file that has 4 bits already is taken as it is.
CONVERTER = """
import ctypes, os, sys
import llama_cpp

source, place, precision = sys.argv[1:]
os.mkdir(place)
place = os.path.join(place, "model.gguf")
known = llama_cpp.Llama(source, vocab_only=True, verbose=False).metadata.get("general.file_type")
four_bits = (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
             llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M)
if precision == "int4" and known in map(str, four_bits):
    os.symlink(source, place)
else:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"fp32": llama_cpp.LLAMA_FTYPE_ALL_F32, "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
                    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1}[precision]
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(place), ctypes.byref(params)):
        sys.exit("llama_model_quantize failed")
"""

LLAMA_CPP = Driver(
    "llama-cpp",
    "llama.cpp",
    SOURCE,
    requirements=("llama-cpp-python==0.3.36",),
    converter=CONVERTER,
    precisions=("fp32", "int8", "int4"),
    reads_gguf=True,
    reads_folders=False,
    modes={
        PLAIN: {},
        "lookup-3": {"lookup": 3, "ngram": 3},
        "lookup-10": {"lookup": 10, "ngram": 2},
    },
)
