"""All peers of one comparison: set up one after another, asked in turns, left out from where they fail.

What fails is remembered with its own message and never ends the comparison. Which prompts there are, and what else
runs between them, is not known here.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from specdec.engines.base import Engine
from specdec.engines.damage import WIDTH, Damage
from specdec.engines.errors import EngineError, RequestError
from specdec.tools.peers.conversion import Tell, converted
from specdec.tools.peers.damage import peer_damage
from specdec.tools.peers.driver import Driver
from specdec.tools.peers.environments import environment_python
from specdec.tools.peers.process import Peer
from specdec.tools.peers.report import LOGITS, PeerFailure, PeerModel, PeerReport, PeerRun, peer_reports


def to_stderr(line: str) -> None:
    """Say what is being done, beside the report."""
    print(line, file=sys.stderr, flush=True)


class PeerSet:
    """Peers in one precision; `peers` has one entry for each mode that still runs, `failures` why others do not.

    `stack` ends their processes.
    """

    def __init__(self, precision: str, threads: int, stack: ExitStack, tell: Tell = to_stderr) -> None:
        self.precision = precision
        self.peers: list[Peer] = []
        self.failures: list[PeerFailure] = []
        self._threads, self._stack, self._tell = threads, stack, tell
        self._models: dict[str, tuple[Peer, tuple[str, ...]]] = {}
        self._damage: dict[str, Damage | None] = {}
        self._turn = 0

    def add(self, driver: Driver, source: Path, draft: Path | None = None, modes: Sequence[str] = ()) -> None:
        """Install a peer, convert `source` (and `draft`) for it, start it; all its modes, or those that are named."""
        known = driver.all_modes if draft else dict(driver.modes)
        if unmet := [mode for mode in modes if mode not in known]:
            raise RequestError(f"{driver.name}:{unmet[0]} needs a draft model: give one with --peer-draft")
        try:
            python = str(environment_python(driver.name, driver.requirements, self._tell))
            model = converted(driver, python, source, self.precision, self._tell)
            small = (
                converted(driver, python, draft, self.precision, self._tell) if draft and driver.draft_modes else None
            )
            peer = self._stack.enter_context(closing(Peer(driver, python, model, self._threads, small)))
        except (EngineError, OSError) as exc:  # OSError: the cache cannot be written
            self._failed(driver.name, "", exc)
            return
        self._models[driver.name] = (peer, tuple(modes or known))
        self.peers += [peer.in_mode(mode) for mode in modes or known]

    def run(self, question_id: int | str, prompt: Sequence[int], count: int) -> list[PeerRun]:
        """Let every mode generate `count` tokens after `prompt`, each call starting with another one."""
        self._turn += 1
        first = self._turn % len(self.peers) if self.peers else 0
        runs = []
        for peer in (*self.peers[first:], *self.peers[:first]):
            if peer not in self.peers:
                continue  # it went down with another mode's process
            try:
                answer = peer.generate(prompt, count)
            except EngineError as exc:
                self.drop(peer, exc)
                continue
            runs.append(
                PeerRun(
                    peer=peer.driver.name,
                    mode=peer.mode,
                    question_id=question_id,
                    token_ids=answer.token_ids,
                    decoded=answer.decoded,
                    seconds=answer.seconds,
                )
            )
        return runs

    def drop(self, peer: Peer, reason: EngineError) -> None:
        """Leave a mode out from here on; the peer's others go on in a new process."""
        self.peers.remove(peer)
        self._failed(peer.driver.name, peer.mode, reason)
        self._restart(peer)

    def compare(self, reference: Engine, texts: Sequence[Sequence[int]], width: int = WIDTH) -> None:
        """Measure each peer's damage on `texts` (token ids) against `reference`, the same weights in fp32.

        Raises `RequestError` where `reference` is of another model, or the texts are too short.
        """
        for name, (peer, _) in self._models.items():
            if any(each.driver.name == name for each in self.peers):
                try:
                    [self._damage[name]] = peer_damage([peer], reference, texts, width)
                except EngineError as exc:
                    self._failed(name, LOGITS, exc)
                    self._restart(peer)

    def report(
        self, runs: Sequence[PeerRun], ours: Mapping[int | str, Sequence[int]] | None = None
    ) -> list[PeerReport]:
        """Sum up what was run; `ours` are our own tokens by question."""
        models = [
            PeerModel(peer=name, version=peer.version, size=peer.size, modes=modes, damage=self._damage.get(name))
            for name, (peer, modes) in self._models.items()
        ]
        return peer_reports(self.precision, models, runs, self.failures, ours)

    def _restart(self, peer: Peer) -> None:
        try:
            peer.restart()
        except EngineError as exc:
            name = peer.driver.name
            self.peers = [each for each in self.peers if each.driver.name != name]
            self._failed(name, "", exc)

    def _failed(self, peer: str, mode: str, reason: Exception) -> None:
        message = " ".join(str(reason).split())
        self.failures.append(PeerFailure(peer=peer, mode=mode, message=message))
        self._tell(f"{self.failures[-1].name} is left out: {message}")
