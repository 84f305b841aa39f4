"""What a plan (an engine file of TensorRT or TensorRT-RTX) takes, as arithmetic: profiles, shapes, architectures.

The builder declares profiles from here and the engine chooses among them, so the two cannot disagree. This module knows
no library, no GPU and no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.engines.base import capacity_bucket
from specdec.engines.contract import CHUNK_INPUTS, ModelSpec, past_names
from specdec.engines.errors import ContractError, EngineUnavailableError
from specdec.engines.manifest import Limits, Plan

PREFILL_WIDTH = 512  # tokens of a prefill pass: the runtime asks for 256 (runtime/kv.py), the invariance gate for 300
LEAST_VERIFY_WIDTH = 2  # `exact` runs no pass of one token
USUAL_WIDTH = 8  # tokens of a pass that speculates on four to seven

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """A range of passes that an engine is compiled for: from one row of one token up to `rows` x `width`.

    At most `logits` positions of a row get logits. `usual`: rows, width, logits that kernels are chosen for.
    """

    name: str
    rows: int
    width: int
    logits: int
    usual: tuple[int, int, int]

    def takes(self, rows: int, width: int, logits: int) -> bool:
        """Whether a pass of `rows` x `width` tokens with `logits` scored positions a row fits."""
        return rows <= self.rows and width <= self.width and logits <= self.logits

    def __str__(self) -> str:
        return f"{self.name} {self.rows} x {self.width} (logits at {self.logits})"


def plan_sizes(limits: Limits) -> dict[str, int]:
    """Sizes of a `Plan` that serves `limits`: its fields `max_batch` to `capacity`.

    A row of `max_length` tokens may run in a pass as wide as another row's tree: the cache has room for both.
    """
    verify = max(limits.max_tree, LEAST_VERIFY_WIDTH)
    capacity = capacity_bucket(limits.max_length + verify)
    return {
        "max_batch": limits.max_batch,
        "prefill_width": min(PREFILL_WIDTH, capacity),
        "verify_width": verify,
        "capacity": capacity,
    }


def profiles(plan: Plan) -> tuple[Profile, Profile]:
    """The plan's profiles in the order in which its engine has them: verify, prefill."""
    width, prefill = plan.verify_width, plan.prefill_width
    usual = min(USUAL_WIDTH, width)
    return (
        Profile("verify", plan.max_batch, width, width, (1, usual, usual)),
        Profile("prefill", 1, prefill, min(width, prefill), (1, prefill, 1)),
    )


def choose_profile(plan: Plan, rows: int, width: int, logits: int) -> int:
    """Index of the first profile that takes a pass; `ContractError` that names the profiles when none does."""
    known = profiles(plan)
    for index, profile in enumerate(known):
        if profile.takes(rows, width, logits):
            return index
    raise ContractError(
        f"a chunk of {rows} x {width} tokens with {logits} logits fits no profile of this engine: "
        f"{', '.join(map(str, known))}; narrow it, or export with other limits"
    )


def input_shapes(spec: ModelSpec, capacity: int, rows: int, width: int, logits: int) -> dict[str, Shape]:
    """Shape of every input of a pass, in the contract's order."""
    ids, positions, past_lens, mask, indices = CHUNK_INPUTS
    cache = (rows, spec.num_kv_heads, capacity, spec.head_dim)
    return {
        ids: (rows, width),
        positions: (rows, width),
        past_lens: (rows,),
        mask: (rows, width, width),
        indices: (rows, logits),
        **dict.fromkeys(past_names(spec.num_layers), cache),
    }


def plan_key(backend: str, architectures: Sequence[str]) -> str:
    """Name of a plan in its variant and, with `.plan`, of its file: "tensorrt-rtx-sm89"."""
    return "-".join([backend, *architectures])


def choose_plan(plans: Mapping[str, Plan], backend: str, architecture: str) -> Plan:
    """The plan of `backend` for a GPU of `architecture` ("sm89"); of several, the one for the fewest others.

    Raises `EngineUnavailableError` that says what the bundle holds and how to export what is missing.
    """
    fitting = [plan for plan in plans.values() if plan.backend == backend and architecture in plan.architectures]
    if fitting:
        return min(fitting, key=lambda plan: len(plan.architectures))
    raise EngineUnavailableError(
        f"this bundle has no {backend} plan for {architecture}, which this GPU is: it holds "
        f"{', '.join(sorted(plans)) or 'none'}; export it with --backend {backend} --arch {architecture}"
    )
