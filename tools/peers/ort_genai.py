"""onnxruntime-genai: its driver, its model builder, and its n-gram speculation, fixed and adaptive.

Runs in no process of ours. Which figures come of it is not known here.
"""

from specdec.tools.peers.driver import PLAIN, Driver

# `min_length` leaves no token free to be an end token, which would not be handed out. Speculation buffers the tokens of
# a round, so that most calls only hand one out.
SOURCE = """
import json, sys, time
import numpy, onnxruntime_genai as genai

config = genai.Config(sys.argv[1])
options = {"intra_op_num_threads": int(sys.argv[2])}
config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
model = genai.Model(config)

def after(tokens, count, **speculative):
    params = genai.GeneratorParams(model)
    end = len(tokens) + count
    params.set_search_options(do_sample=False, min_length=end, max_length=end)
    if speculative:
        params.set_speculative_options(**speculative)
    generator = genai.Generator(model, params)
    generator.append_tokens(numpy.array([tokens], numpy.int32))
    return generator

def generate(prompt, count, **speculative):
    generator = after(prompt, count, **speculative)
    generator.generate_next_token()
    started = time.perf_counter()
    for _ in range(count - 1):
        generator.generate_next_token()
    seconds = time.perf_counter() - started
    return [int(token) for token in generator.get_sequence(0)[len(prompt):]], 1, seconds

def score(tokens):
    generator = after(tokens, 1)
    return numpy.array(generator.get_output("logits"))[0]

version = genai.__version__
"""

CONVERTER = """
import runpy, sys, tempfile

source, place, precision = sys.argv[1:]
with tempfile.TemporaryDirectory() as cache:
    sys.argv = ["builder", "-m", source, "-i", source, "-o", place, "-p", precision, "-e", "cpu", "-c", cache]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""

ORT_GENAI = Driver(
    "ort-genai",
    "onnxruntime-genai",
    SOURCE,
    requirements=(
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.32.0",
        "onnx-ir==1.1.0",
        "torch==2.13.0",
        "transformers==5.24.0",
        "gguf==0.19.0",
        "accelerate==1.15.0",
    ),
    converter=CONVERTER,
    precisions=("fp32", "int8", "int4"),
    modes={
        PLAIN: {},
        "ngram-4": {"ngram_size": 3, "max_draft_tokens": 4},
        "ngram-8": {"ngram_size": 3, "max_draft_tokens": 8},
        "ngram-adaptive": {"ngram_size": 3, "max_draft_tokens": 8, "min_adaptive_k": 1},
    },
)
