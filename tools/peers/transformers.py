"""transformers: its driver, plain and with prompt lookup, and assisted generation where there is a draft model.

Runs in no process of ours. Only fp32 is run: int8 and int4 on CPUs are other packages' work.
"""

from specdec.tools.peers.driver import PLAIN, Driver

# No end token is known to the generation, so none ends it. The streamer is given the prompt, then the tokens of each
# round: what comes with the first round is not timed.
SOURCE = """
import json, sys, time
import numpy, torch, transformers
from transformers import AutoModelForCausalLM, GenerationConfig

torch.set_num_threads(int(sys.argv[2]))
model, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() if path else None
                for path in (sys.argv[1], sys.argv[3]))
for each in (model, draft):
    if each is not None:
        each.generation_config = GenerationConfig(pad_token_id=0)

class Clock:
    def __init__(self):
        self.puts, self.first = 0, 0

    def put(self, tokens):
        self.puts += 1
        if self.puts == 2:
            self.first, self.started = tokens.numel(), time.perf_counter()

    def end(self):
        pass

def generate(prompt, count, assisted=False, **options):
    tokens = torch.tensor([prompt])
    clock = Clock()
    if assisted:
        options["assistant_model"] = draft
    with torch.inference_mode():
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count,
                               streamer=clock, **options)
    seconds = time.perf_counter() - clock.started
    return found[0, len(prompt):].tolist(), clock.first, seconds

def score(tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()

version = transformers.__version__
"""

TRANSFORMERS = Driver(
    "transformers",
    "transformers",
    SOURCE,
    requirements=("torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate==1.15.0"),
    precisions=("fp32",),
    modes={
        PLAIN: {},
        "lookup-3": {"prompt_lookup_num_tokens": 3},
        "lookup-10": {"prompt_lookup_num_tokens": 10},
    },
    draft_modes={"assisted": {"assisted": True}},
)
