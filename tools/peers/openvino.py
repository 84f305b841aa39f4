"""OpenVINO GenAI: its driver, its reading of GGUF files, prompt lookup, and speculation where there is a draft model.

Runs in no process of ours. The pipeline gives no logits: they come from OpenVINO itself on the same graph, so what the
pipeline's own attention rounds is not in them.
"""

from specdec.tools.peers.driver import PLAIN, Driver

# One pipeline a mode: whether it drafts, and with what, is decided when it is made. A pipeline is asked for its tokens
# by a streamer, which is given what each pass adds.
SOURCE = """
import json, sys, time
import numpy, openvino, openvino_genai as genai

device = {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
pipelines, scorers = {}, []

class Clock(genai.StreamerBase):
    def __init__(self):
        super().__init__()
        self.first = 0

    def write(self, tokens):
        if not self.first:
            self.first, self.started = 1 if isinstance(tokens, int) else len(tokens), time.perf_counter()
        return genai.StreamingStatus.RUNNING

    def end(self):
        self.seconds = time.perf_counter() - self.started

def pipeline(assisted, attention, lookup):
    key = (assisted, attention, lookup)
    if key not in pipelines:
        options = {"prompt_lookup": True} if lookup else {}
        if attention:
            options["ATTENTION_BACKEND"] = attention
        if assisted:
            options["draft_model"] = genai.draft_model(sys.argv[3], "CPU", **device)
        pipelines[key] = genai.LLMPipeline(sys.argv[1], "CPU", **device, **options)
    return pipelines[key]

def generate(prompt, count, assisted=False, attention="", **options):
    config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False, **options)
    tokens = numpy.array([prompt], numpy.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(numpy.ones_like(tokens)))
    clock = Clock()
    found = pipeline(assisted, attention, "max_ngram_size" in options).generate(inputs, config, clock)
    return [int(token) for token in found.tokens[0]][:count], clock.first, clock.seconds

def score(tokens):
    if not scorers:
        core = openvino.Core()
        scorers.append(core.compile_model(sys.argv[1] + "/openvino_model.xml", "CPU", device).create_infer_request())
    scorer, length = scorers[0], len(tokens)
    scorer.reset_state()
    known = {
        "input_ids": numpy.array([tokens], numpy.int64),
        "attention_mask": numpy.ones((1, length), numpy.int64),
        "position_ids": numpy.arange(length)[None],
        "beam_idx": numpy.zeros(1, numpy.int32),
    }
    names = [name for each in scorer.model_inputs for name in each.names if name in known]
    scorer.infer({name: known[name] for name in names})
    return scorer.get_tensor("logits").data[0]

pipeline(False, "", False)
version = genai.__version__
"""

# GenAI saves what it has read beside the file. A file in another precision is rewritten first, every matrix of it. It
# reads no matrices in fp32: they are fp16 there, and computed in fp32.
CONVERTER = """
import os, sys
import gguf, numpy, openvino_genai
from gguf.quants import dequantize, quantize

source, place, precision = sys.argv[1:]
kinds = {"fp32": gguf.GGMLQuantizationType.F16, "int8": gguf.GGMLQuantizationType.Q8_0,
         "int4": gguf.GGMLQuantizationType.Q4_1}
types = {"fp32": 1, "int8": 7, "int4": 3}
os.mkdir(place)
file = os.path.join(place, "model.gguf")
reader, kind = gguf.GGUFReader(source), kinds[precision]
names = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1]
if set(names) == {kind.name} or (precision == "int4" and max(names, key=names.count).startswith("Q4_")):
    os.symlink(source, file)
else:
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = types[precision] if name == "general.file_type" else field.contents()
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value, field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim > 1:
            writer.add_tensor(tensor.name, quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, weights.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
openvino_genai.LLMPipeline(file, "CPU", enable_save_ov_model=True)
os.remove(file)
"""

OPENVINO = Driver(
    "openvino",
    "OpenVINO GenAI",
    SOURCE,
    requirements=("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "gguf==0.19.0"),
    converter=CONVERTER,
    precisions=("fp32", "int8", "int4"),
    reads_gguf=True,
    reads_folders=False,
    modes={
        PLAIN: {},
        "plain-sdpa": {"attention": "SDPA"},
        "lookup-3": {"num_assistant_tokens": 3, "max_ngram_size": 3},
        "lookup-5": {"num_assistant_tokens": 5, "max_ngram_size": 3},
    },
    draft_modes={"assisted": {"assisted": True, "num_assistant_tokens": 4}},
)
