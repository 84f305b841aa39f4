"""Other runtimes to compare with, each in a process and Python of its own: onnxruntime-genai and llama.cpp.

Token ids go in and come out as JSON lines, so all sides decode the same prompt for the same number of tokens and take
turns on an otherwise idle machine. Nothing of a peer is imported here. What a peer's model is, in which precision, and
whether it is the same model as ours, is not known here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from specdec.engines.errors import EngineError, EngineUnavailableError
from specdec.tools.figures import GENAI, LLAMA


@dataclass(frozen=True, slots=True)
class Driver:
    """How to drive one peer: `source` runs in its Python with a model and a number of threads as arguments.

    It prints {"version"}, then answers lines of {"tokens", "count"} with {"token_ids", "seconds"}: `count` greedy
    tokens, end tokens or not. The first comes from the prompt's pass, so the clock starts after it: n tokens, n - 1
    timed passes. Lines of {"tokens", "path"} ask for the logits after every token, float32 [L, V], in that .npy file.
    """

    name: str
    title: str
    source: str


# `min_length` leaves only the last token free to be an end token.
ORT_GENAI = Driver(GENAI, "onnxruntime-genai", """
import json, sys, time
import numpy, onnxruntime_genai as genai

config = genai.Config(sys.argv[1])
options = {"intra_op_num_threads": int(sys.argv[2])}
config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
model = genai.Model(config)

def after(tokens, count):
    params = genai.GeneratorParams(model)
    end = len(tokens) + count
    params.set_search_options(do_sample=False, min_length=end - 1, max_length=end)
    generator = genai.Generator(model, params)
    generator.append_tokens(numpy.array([tokens], numpy.int32))
    return generator

def generate(prompt, count):
    generator = after(prompt, count)
    generator.generate_next_token()
    started = time.perf_counter()
    for _ in range(count - 1):
        generator.generate_next_token()
    seconds = time.perf_counter() - started
    return [int(token) for token in generator.get_sequence(0)[len(prompt):]], seconds

def score(tokens):
    return after(tokens, 1).get_output("logits")[0]

version = genai.__version__
""")  # fmt: skip

# An end token is a token like any other. `llama_decode` and numpy's argmax take less time than `Llama.generate`,
# `Llama.eval` and the library's greedy sampler (0.2 of 13 ms a token with SmolLM2-135M in Q8_0); flash attention, which
# `Llama` leaves off, takes more.
LLAMA_CPP = Driver(LLAMA, "llama.cpp", """
import json, sys, time
import llama_cpp, numpy

llm = None

def loaded(size, scoring):
    global llm
    if llm is None or llm.n_ctx() < size or llm.context_params.n_batch < scoring * size:
        if llm is not None:
            llm.close()
        threads, size = int(sys.argv[2]), max(size, 512)
        llm = llama_cpp.Llama(sys.argv[1], n_ctx=size, n_threads=threads, n_threads_batch=threads, logits_all=scoring,
                              verbose=False)
    llm.reset()
    return llm

def generate(prompt, count):
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
    return tokens, time.perf_counter() - started

def score(tokens):
    llm = loaded(len(tokens), True)
    llm.eval(tokens)
    return llm.scores[:len(tokens)]

loaded(1, False)
version = llama_cpp.__version__
""")  # fmt: skip
