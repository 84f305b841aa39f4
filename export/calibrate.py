"""What the products of a model are fed: statistics of their inputs over a few prompts, from one pass through PyTorch.

Text comes from a file (JSON lines as Spec-Bench's, or plain text) or is the small set here; the caller turns it into
tokens. One pass in fp32 on one number of threads gives the same bits again. This module knows modules that multiply by
a weight; it knows no graph, no tokenizer and no grid, and decides nothing.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engines.errors import ExportError, SourceError

MAX_TOKENS = 512  # of one prompt: attention costs grow with its square, statistics do not improve

_BITS = 1 << 15  # non-negative bfloat16 numbers, NaN and infinity among them
_FIELDS = ("turns", "prompt", "text")


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Inputs of one product, [T, K] over all prompts: T tokens, K channels.

    `maximum` [K]: largest |x| of each channel. `mean_square` [K]. `magnitudes` [J], ascending: |x| rounded to bfloat16
    (0.4 %), and `counts` [J], how often each occurs.
    """

    tokens: int
    maximum: npt.NDArray[np.float32]
    mean_square: npt.NDArray[np.float32]
    magnitudes: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]

    def percentile(self, percent: float) -> float:
        """|x| that `percent` of the values do not exceed, to bfloat16; 100 is the exact maximum."""
        if percent >= 100:
            return float(self.maximum.max())
        below = np.cumsum(self.counts)
        return float(self.magnitudes[np.searchsorted(below, below[-1] * percent / 100)])


def read_prompts(path: Path) -> list[str]:
    """Texts of a file: JSON lines with `turns`, `prompt` or `text`, else paragraphs of plain text.

    Turns are texts of their own. Raises `SourceError` for a file that cannot be read or holds no text.
    """
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SourceError(f"prompts {path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    if content.lstrip().startswith("{"):
        lines = enumerate(content.splitlines(), 1)
        found = [text for number, line in lines if line.strip() for text in _texts(line, f"{path}, line {number}")]
    else:
        found = content.split("\n\n")
    prompts = [text.strip() for text in found if text.strip()]
    if not prompts:
        raise SourceError(f"prompts {path} has no text: give JSON lines with {', '.join(_FIELDS)}, or paragraphs")
    return prompts


def collect(model: Any, prompts: Iterable[Sequence[int]]) -> dict[str, Statistics]:
    """Run `prompts` (token ids, each a text from its start) through a causal language model of transformers, once.

    Returns the statistics of each product (nn.Linear, Conv1D; the LM head too) by the state-dict name of its weight.
    Products that read the same tensor share theirs. Raises `ExportError` when there is no token, or an input is not
    finite.
    """
    recorder = _Recorder()
    with recorder.listening(model), torch.inference_mode():
        for prompt in prompts:
            if len(prompt):
                model(input_ids=torch.tensor([list(prompt[:MAX_TOKENS])]), use_cache=False)
                recorder.forget()
    return recorder.statistics()


def _texts(line: str, where: str) -> list[str]:
    try:
        record = json.loads(line)
    except ValueError as exc:
        raise SourceError(f"prompts {where} is not JSON: {exc}") from exc
    field = next((name for name in _FIELDS if isinstance(record, Mapping) and name in record), None)
    if field is None:
        raise SourceError(f"prompts {where} has none of the fields {', '.join(_FIELDS)}")
    value = record[field]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise SourceError(f"prompts {where}: {field} is not text")
    return texts


class _Sums:
    """Running sums over the inputs of one product, in float64; whole numbers where they count."""

    def __init__(self, channels: int) -> None:
        self.tokens = 0
        self.maximum = torch.zeros(channels)
        self.squares = torch.zeros(channels, dtype=torch.float64)
        self.counts = torch.zeros(_BITS, dtype=torch.int64)

    def add(self, x: torch.Tensor) -> None:
        """Take in `x` [..., K]."""
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)  # [T, K]
        size = rows.abs()
        self.tokens += len(rows)
        self.maximum = torch.maximum(self.maximum, size.amax(0))
        self.squares += rows.double().square().sum(0)
        bits = size.to(torch.bfloat16).view(torch.int16).flatten()
        self.counts += torch.bincount(bits.to(torch.int32), minlength=_BITS)

    def statistics(self) -> Statistics:
        """What the sums say."""
        found = self.counts.nonzero()[:, 0]
        return Statistics(
            tokens=self.tokens,
            maximum=self.maximum.numpy(),
            mean_square=(self.squares / self.tokens).float().numpy(),
            magnitudes=found.to(torch.int16).view(torch.bfloat16).float().numpy(),
            counts=self.counts[found].numpy(),
        )


class _Recorder:
    """Listens to the products of a model; a tensor that several of them read one after another is taken in once."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._last: tuple[torch.Tensor, _Sums] | None = None

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """While open, inputs of the products of `model` are taken in."""
        handles = [
            module.register_forward_pre_hook(self._hook(f"{name}.weight"))
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forget(self) -> None:
        """Let go of the last tensor."""
        self._last = None

    def statistics(self) -> dict[str, Statistics]:
        """What was taken in, by name; shared where it was."""
        if not self._sums:
            raise ExportError("calibration has seen no token: give it prompts")
        made = {key: sums.statistics() for key, sums in {id(sums): sums for sums in self._sums.values()}.items()}
        return {name: made[id(sums)] for name, sums in self._sums.items()}

    def _hook(self, name: str) -> Any:
        def take(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            if self._last is not None and self._last[0] is x:
                self._sums.setdefault(name, self._last[1])
                return
            if not torch.isfinite(x).all():
                raise ExportError(f"the inputs of {name} are not finite: calibrate in fp32, or with other prompts")
            if name not in self._sums:
                self._sums[name] = _Sums(x.shape[-1])
            self._sums[name].add(x)
            self._last = x, self._sums[name]

        return take


# Prose, dialogue, lists, letters, code, data, mathematics, other languages, instructions, a passage with a question.
TEXTS = (
    "The ferry left at six, an hour late, and by then the fog had eaten the far shore. Nobody on deck complained. "
    "A woman in a green coat counted her boxes of seedlings twice, and a boy leaned over the rail to see whether the "
    "water really was, as his grandfather claimed, the colour of old tea.",
    "Rivers move sediment in three ways: as dissolved load, as suspended particles, and as bed load that rolls and "
    "bounces along the bottom. When the current slows, the coarsest grains settle first, which explains why deltas "
    "grade from sand near the mouth to clay further out.",
    "User: My laptop gets hot and the fan is loud, even when I only read mail. What can I check?\n"
    "Assistant: First look at which program uses the processor. On most systems the task manager sorts by CPU. If "
    "nothing stands out, clean the vents, and make sure the computer stands on a hard surface.\n"
    "User: There is one called indexer at 90 percent.\nAssistant: That one builds the search index. Let it finish.",
    "Shopping list for Saturday:\n- 2 kg flour\n- 12 eggs\n- 500 g butter, unsalted\n- lemons (4)\n- baking powder\n"
    "- candles, the thin ones\n\nTo do before guests arrive:\n1. Call Ines about the chairs.\n2. Bake both layers.\n"
    "3. Hide the presents behind the bookcase.",
    "def running_median(values, width):\n    \"\"\"Yield the median of each window of `width` values.\"\"\"\n"
    "    window = sorted(values[:width])\n    yield window[width // 2]\n"
    "    for old, new in zip(values, values[width:]):\n        window.remove(old)\n"
    "        bisect.insort(window, new)\n        yield window[width // 2]\n",
    "SELECT c.name, COUNT(*) AS orders, SUM(o.total) AS revenue\nFROM customers c\n"
    "JOIN orders o ON o.customer_id = c.id\nWHERE o.created_at >= '2021-01-01'\n"
    "GROUP BY c.name\nHAVING COUNT(*) > 3\nORDER BY revenue DESC;",
    '{"station": "K-17", "readings": [{"t": "08:00", "temp": -3.5, "wind": 12}, {"t": "09:00", "temp": -2.75, '
    '"wind": 15}], "status": "ok", "comment": null}',
    "A train covers 210 km in 2.5 hours, waits 20 minutes, and returns at 70 km/h. How long is the whole trip? The way "
    "out takes 2.5 h. The way back takes 210 / 70 = 3 h. With 1/3 h of waiting the sum is 5.83 h, so the answer is 5 "
    "hours and 50 minutes.",
    "Let f(x) = x^3 - 3x + 1. Then f'(x) = 3x^2 - 3, which is zero at x = -1 and x = 1. Since f''(1) = 6 > 0 and "
    "f''(-1) = -6 < 0, there is a local minimum f(1) = -1 and a local maximum f(-1) = 3. So f has three real roots.",
    "Sehr geehrte Frau Lindner, vielen Dank für Ihre Nachricht vom Dienstag. Leider können wir den Termin nicht "
    "halten, weil die Ersatzteile erst in der nächsten Woche geliefert werden. Passt Ihnen der vierzehnte, vormittags?",
    "El mercado abre a las siete. A esa hora los pescadores ya han vendido lo mejor, pero todavía quedan sardinas, "
    "limones y pan caliente. Mi abuela decía que se cocina con la nariz, no con el reloj.",
    "Il pleuvait depuis trois jours. 今天的天气很好,我们去公园散步吧。"
    "Сегодня мы читаем новую главу. 明日の会議は十時からです。",
    "Write a short, polite email to a landlord who has not repaired the heating. Mention the date of the first report, "
    "ask for a concrete appointment, and stay friendly. Use no more than eighty words and do not threaten.",
    "Summarize the following text in one sentence. The council voted on Monday to turn the tram depot into a public "
    "library. Supporters pointed to the lack of reading rooms in the district; opponents feared the costs, which an "
    "independent report puts at nine million. Work is to begin next spring and to last about two years.",
    "Passage 1: Basalt forms when lava low in silica cools quickly at the surface. Passage 2: Granite cools slowly at "
    "depth, so its crystals are large enough to be seen. Question: Why does granite look speckled? Answer: Because it "
    "cools slowly, its crystals grow large enough to be seen with the naked eye.",
    "| Model | Weight (g) | Battery (h) | Price |\n|---|---|---|---|\n| Aster | 172 | 14 | $399 |\n| Briar | 198 | 21 "
    "| $549 |\n| Clover | 155 | 11 | $279 |\n\nWhich one would you take on a long hike, and why?",
)  # fmt: skip
