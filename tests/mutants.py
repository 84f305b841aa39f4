"""Faults that are planted into the runtime, one at a time, and the tests that have to notice each: `make mutants`.

A test that never fails proves nothing. Every mutant is a patch of one place in `runtime/`; it is applied to a copy of
the repository, and each test named with it has to fail there (a crash of pytest, a collection error or no test at all
is an error, not a kill). Before that, all named tests have to pass on the unchanged copy. This module is also the
pytest plugin of those runs: it ends a named test at its first failure, and fails the run if `specdec` is not the copy.
Length: the table.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("engines", "export", "runtime", "tools", "train", "tests", "typing_root", "pyproject.toml")
SECONDS = 600  # a run that takes longer hangs, which is an error; the slowest machine so far took 120 for all of them

ACCEPT, CHANCE, GROWTH, NGRAM = (f"tests/test_{name}.py::" for name in ("accept", "chance", "growth", "ngram"))
FALLBACK = "tests/test_fallback.py::test_the_"
CHAIN = ACCEPT + "test_sampled_chain"
TREE = ACCEPT + "test_tree_drawn_without_replacement"
RANKED = ACCEPT + "test_tree_of_the_most_probable_tokens"
REQUESTS = ACCEPT + "test_requests_are_distributed_as_plain_decoding"
GREEDY = ACCEPT + "test_greedy_requests_give_the_argmaxes_of_plain_decoding"
COUPLED = CHANCE + "test_coupled_text_is_the_same_with_and_without_drafts"
PROPOSALS = GROWTH + "test_proposals_are_those_of_the_drafts_definition"
GREEDY_TREES = GROWTH + "test_greedy_trees_give_the_targets_own_text"
OWN_DRAFT = GROWTH + "test_the_target_as_its_own_draft_is_accepted_to_the_last_token"
GENERATIONS = GROWTH + "test_generations_are_distributed_as_plain_decoding"
CONTINUOUS, PLANS = "tests/test_continuous.py::", "tests/test_controller.py::"
MEDUSA = "tests/test_medusa.py::"
HEADS = MEDUSA + "test_proposals_are_those_of_the_heads_definition"
KNOWING = MEDUSA + "test_heads_that_know_the_target_are_accepted_to_the_last_token"
SKIPPING = "tests/test_layerskip.py::"
EAGLES = tuple(f"tests/test_eagle.py::test_{shape}_are_those_of_the_torch_module" for shape in ("chains", "trees"))
PREFIXES = "tests/test_prefixes.py::"
TURNS = PREFIXES + "test_a_second_turn_is_what_it_is_without_reuse"
SHARED = PREFIXES + "test_a_shared_beginning_is_reused_as_far_as_it_goes"
REUSE = PREFIXES + "test_texts_bits_and_proposals_are_those_without_reuse"
TERMS = ("repetition", "presence", "frequency", "bad words", "least length", "grammar")


class Mutant(NamedTuple):
    """In `file`, `old` (there exactly once) becomes `new`, which `breaks` something; then all `tests` have to fail."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # Rejection sampling, token by token
    Mutant("inverted ratio", "acceptance probability", "accept.py",
           "target[token] / q[token]", "q[token] / target[token]", (CHAIN, TREE)),
    Mutant("residual from p", "what follows a rejection", "accept.py",
           "np.maximum(target - q, 0)", "target", (CHAIN, TREE)),
    Mutant("residual from q", "what follows a rejection", "accept.py",
           "np.maximum(target - q, 0)", "np.maximum(q - target, 0)", (CHAIN, TREE)),
    Mutant("residual unguarded", "p == q to rounding: nothing left to draw from", "accept.py",
           "_normalized(rest) if rest.any() else target", "_normalized(rest)",
           (ACCEPT + "test_a_residual_that_underflows_gives_a_token_of_p",)),
    Mutant("siblings against the first p", "later siblings do not make up for lost ones", "accept.py",
           "target[token] / q[token]", "p(node)[token] / q[token]", (TREE,)),
    Mutant("residual not renormalized", "later siblings are accepted too rarely", "accept.py",
           "_normalized(rest) if rest.any()", "rest if rest.any()", (TREE, RANKED)),
    Mutant("q not renormalized", "second draws without replacement", "accept.py",
           "draft = _normalized(_without(q, token))", "draft = _without(q, token)", (TREE,)),
    Mutant("drawn without replacement, tested with", "second draws", "accept.py",
           "                draft = _normalized(_without(q, token))\n", "", (TREE,)),
    Mutant("drawn with replacement, tested without", "second draws", "chance.py",
           "            left[drawn[-1]] = 0\n", "",
           (TREE, CHANCE + "test_draws_without_replacement_enumerated")),
    Mutant("order of children ignored", "siblings are tested in another order than drawn", "accept.py",
           "for child in tree.children(node):", "for child in tree.children(node)[::-1]:", (TREE,)),
    Mutant("order of children lost in the tree", "siblings change places when the first branch is put first", "tree.py",
           "stack += self.children(order[-1])[::-1]", "stack += self.children(order[-1])", (TREE,)),
    Mutant("deterministic child accepted outright", "deterministic drafts", "accept.py",
           "target[token] if q is None else", "1 if q is None else",
           (ACCEPT + "test_deterministic_chain", RANKED)),
    Mutant("rejected deterministic token stays", "residual of deterministic drafts", "accept.py",
           "rest = _without(target, token)", "rest = target",
           (ACCEPT + "test_deterministic_chain", RANKED)),
    Mutant("deterministic child tested as if sampled", "p/q for what was not drawn from q", "drafters/growth.py",
           "tuple(self._q) if sampled else None", "tuple(self._q)", (RANKED,)),
    Mutant("deterministic draft handed on as sampled", "p/q for what was not drawn from q", "drafters/model.py",
           "sampled=not self._by_rank(row)", "sampled=True", (GENERATIONS + "[block-ranked tree]",)),
    Mutant("drawn from top-k q, tested with raw q", "q is not what was sampled", "drafters/growth.py",
           "choose(weights, count)", "choose(weights * (weights >= weights[most_probable(weights, 2)[-1]]), count)",
           (CHAIN, TREE)),
    Mutant("q of another node", "q is not what was sampled", "drafters/growth.py",
           "self._q.append(weights)", "self._q.append(q[0])",
           (TREE, GROWTH + "test_each_node_keeps_the_distribution_that_it_was_drawn_from")),
    Mutant("dynamic tree drops drawn nodes", "deciding from a token and dropping it", "drafters/growth.py",
           "                self.tokens.append(token)\n",
           "                if sure * float(weights[token]) < 0.2:\n                    continue\n"
           "                self.tokens.append(token)\n",
           (ACCEPT + "test_tree_that_grows_where_the_draft_is_confident",
            ACCEPT + "test_tree_that_does_not_grow_below_unlikely_tokens")),
    Mutant("coin wins at equality", "probability 0 can win", "chance.py",
           "self._rng.random() < probability", "self._rng.random() <= probability",
           (CHANCE + "test_coin_wins_iff_u_is_below",)),
    Mutant("draw from the left", "a weight of 0 can be drawn", "chance.py",
           'side="right"', 'side="left"', (CHANCE + "test_draw_never_returns_a_weight_of_zero",)),
    # Block verification
    Mutant("block: break at the first failure", "a later prefix may still be accepted", "accept.py",
           "            kept, rest = index + 1, left\n",
           "            kept, rest = index + 1, left\n        else:\n            break\n",
           (CHAIN, ACCEPT + "test_block_verification_on_the_papers_example")),
    Mutant("block: weight not clamped", "p_i above 1", "accept.py",
           "min(1, weight * p(index - 1)[token] / _draft(tree, index)[token])",
           "weight * p(index - 1)[token] / _draft(tree, index)[token]", (CHAIN,)),
    Mutant("block: weight forgets the prefix", "p_i without p_{i-1}", "accept.py",
           "min(1, weight * p(index - 1)[token]", "min(1, p(index - 1)[token]", (CHAIN,)),
    Mutant("block: residual without weight", "residual of a prefix, and h_i", "accept.py",
           "np.maximum(weight * p(index) - ", "np.maximum(p(index) - ", (CHAIN,)),
    Mutant("block: wrong chance of the last", "h of the whole chain", "accept.py",
           "weight if last or mass + 1 == weight", "1 if mass + 1 == weight", (CHAIN,)),
    Mutant("block: chance without 1 - weight", "h_i", "accept.py",
           "mass / (mass + 1 - weight)", "mass / (mass + 1)", (CHAIN,)),
    Mutant("block: bonus from the wrong row", "what follows a whole chain", "accept.py",
           "left = p(index) if last", "left = p(index - 1) if last", (CHAIN,)),
    Mutant("block: nothing kept, residual from p", "what follows an empty prefix", "accept.py",
           "0, np.maximum(p(ROOT) - _draft(tree, 0), 0)", "0, p(ROOT)", (CHAIN,)),
    Mutant("block: residual unguarded", "p == q to rounding: nothing left to draw from", "accept.py",
           "rest if rest.any() else p(kept - 1)", "rest",
           (ACCEPT + "test_a_residual_that_underflows_gives_a_token_of_p",)),
    Mutant("block rule on trees", "which rule verifies what", "scheduler.py",
           "tree.linear and tree.is_sampled", "tree.is_sampled", (REQUESTS + "[none-tree]",)),
    Mutant("block where a tree became a chain", "what was drawn chooses the rule", "scheduler.py",
           "tree.linear and tree.is_sampled", "tree.is_chain and tree.is_sampled",
           (ACCEPT + "test_the_rule_does_not_depend_on_what_the_tree_became[block]",)),
    Mutant("dead ends of drafts are errors", "requests that plain decoding would answer", "scheduler.py",
           "            dead[node] = exc\n            return None\n", "            raise\n",
           (ACCEPT + "test_a_dead_end_is_an_error_only_where_the_text_goes[block]",)),
    Mutant("dead ends are passed over", "the text goes on where it cannot", "scheduler.py",
           "        if node in dead:\n            raise dead[node]\n", "        pass\n",
           (ACCEPT + "test_a_dead_end_is_an_error_only_where_the_text_goes",)),
    Mutant("drafts are asked about beyond the end", "errors and work behind an end token", "scheduler.py",
           "if row.ends_in(draft):", "if False:", (ACCEPT + "test_nothing_is_asked_behind_an_end_token",)),
    Mutant("block rule on mixed chains", "which rule verifies what", "tree.py",
           "all(q is not None for q in self.q or ())", "any(q is not None for q in self.q or ())",
           (ACCEPT + "test_requests_with_mixed_drafts",)),
    # Matching, typical acceptance
    Mutant("first child always kept", "greedy and coupled text", "accept.py",
           "for child in tree.children(node) if tree.tokens[child] == token)", "for child in tree.children(node))",
           (ACCEPT + "test_greedy_keeps_the_path_of_argmaxes", GREEDY, COUPLED)),
    Mutant("greedy divides by the temperature", "ties are drawn", "sampling.py",
           "if params.temperature == 0:", "if False:",
           (ACCEPT + "test_a_greedy_tie_goes_to_the_first_token_and_is_never_drawn",)),
    Mutant("typical: sign of the entropy", "which tokens are likely", "accept.py",
           "delta * np.exp((positive", "delta * np.exp(-(positive", (ACCEPT + "test_typical_acceptance_by_hand",)),
    Mutant("typical acceptance called lossless", "reports", "params.py",
           'return not acceptance.startswith("lossy")', "return True",
           (ACCEPT + "test_only_typical_acceptance_is_called_lossy",)),
    # Histories, rows of logits, the pipeline
    Mutant("history without the draft's tokens", "every term that depends on history", "scheduler.py",
           "ask(logits[node + 1], row.tokens + draft)", "ask(logits[node + 1], row.tokens)",
           (*(f"{REQUESTS}[{terms}-{draft}]" for draft in ("chain", "deterministic tree") for terms in TERMS),
            *(f"{GREEDY}[{terms}-tree]" for terms in TERMS), GREEDY_TREES, COUPLED)),
    Mutant("bonus from the wrong row", "p after another node", "scheduler.py",
           "ask(logits[node + 1], row", "ask(logits[node], row",
           (REQUESTS, ACCEPT + "test_requests_in_floating_point", GREEDY, GREEDY_TREES)),
    Mutant("penalties of the prompt alone", "presence and frequency of the answer", "sampling.py",
           "generated = history[self._prompt_length :]", "generated = history[: self._prompt_length]",
           (ACCEPT + "test_history_matters_in_every_case_that_is_about_it",)),
    Mutant("repetition of the prompt alone", "repetition penalty of the answer", "sampling.py",
           "seen = np.unique(np.asarray(history, np.int64))",
           "seen = np.unique(np.asarray(history[: self._prompt_length], np.int64))",
           (ACCEPT + "test_history_matters_in_every_case_that_is_about_it",)),
    Mutant("draft and target through different pipelines", "the draft misses what the request asks for",
           "drafters/model.py", "return row.pipeline.probabilities(known, history)", "return softmax(known)",
           (PROPOSALS, OWN_DRAFT)),
    Mutant("draft's history without its own tokens", "the draft misses what the request asks for", "drafters/model.py",
           "row.tokens + tree.text(node) for", "list(row.tokens) for", (PROPOSALS, OWN_DRAFT)),
    Mutant("draft's logits of another node", "children hang below the wrong node", "drafters/model.py",
           "logits[node - first]", "logits[0]", (PROPOSALS + "[other draft-medusa-greedy]",)),
    # Coupled sampling
    Mutant("noise without position", "one noise for a whole text", "chance.py",
           "spawn_key=(position,)", "spawn_key=(0,)",
           (CHANCE + "test_tokens_of_two_positions_are_independent",
            CHANCE + "test_ranking_over_positions_is_drawing_without_replacement")),
    Mutant("positions overlap", "noise of a position is that of the one before, shifted", "chance.py",
           "z = word + (ids + 1)", "z = (ids + 1 + position)",
           (CHANCE + "test_positions_and_seeds_share_no_number",)),
    Mutant("noise advances", "what was asked before decides", "chance.py",
           "        z = word + (ids + 1)",
           '        self._asked = getattr(self, "_asked", word) + np.uint64(1)\n        z = self._asked + (ids + 1)',
           (CHANCE + "test_noise_is_a_function_of_seed_position_and_token_alone",
            CHANCE + "test_coupled_text_can_be_taken_up_anywhere")),
    Mutant("noise without seed", "every request draws the same", "chance.py",
           "np.random.SeedSequence(seed)", "np.random.SeedSequence(0)",
           (CHANCE + "test_noise_is_a_function_of_seed_position_and_token_alone",
            CHANCE + "test_coupled_text_is_distributed_as_the_targets")),
    Mutant("noise times p", "the ranking is not distributed as p", "chance.py",
           "noise[count:] / p[ids]", "noise[count:] * p[ids]",
           (CHANCE + "test_ranking_over_positions_is_drawing_without_replacement",
            CHANCE + "test_coupled_text_is_distributed_as_the_targets")),
    Mutant("no unlikely token", "what is rare is never said", "chance.py",
           "if mass > 0 and", "if mass > 1 and",
           (CHANCE + "test_ranking_over_positions_is_drawing_without_replacement",
            CHANCE + "test_a_long_tail_is_drawn_as_often_as_it_should")),
    Mutant("unlikely tokens race by themselves too", "their noise is used twice", "chance.py",
           "np.cumsum(others[: len(late)] / left)", "self.noise(position, late) / rest[late]",
           (CHANCE + "test_ranking_over_positions_is_drawing_without_replacement",)),
    Mutant("unlikely tokens stay", "a token that came leaves its weight to those that follow", "chance.py",
           "np.maximum(mass - np.cumsum(rest[late]) + rest[late], rest[late])", "mass",
           (CHANCE + "test_ranking_over_positions_is_drawing_without_replacement",)),
    Mutant("noise of the round, not of the position", "tokens of a block share their noise", "scheduler.py",
           "history), 1, len(history))[0]", "history), 1, len(row.tokens))[0]", (COUPLED,)),
    Mutant("draft's noise of the round", "the draft agrees by chance only", "drafters/model.py",
           "position=len(histories[0])", "position=len(row.tokens)", (PROPOSALS, OWN_DRAFT)),
    # EAGLE: pairs of features and tokens
    Mutant("eagle: features of the token before", "what a pair is fed with", "drafters/eagle.py",
           "np.split(self._features[index], [count])",
           "np.split(np.roll(self._features[index], 1, 0), [count])", EAGLES),
    Mutant("eagle: pairs off by one", "the token of a pair", "drafters/eagle.py",
           "self._model.prefill(index, self._unseen(index, row)[:count], features)",
           "self._model.prefill(index, [0, *self._unseen(index, row)][:count], features)", EAGLES),
    Mutant("eagle: own state not used", "deeper pairs", "drafters/eagle.py",
           "= self._states[index][parent]", "= 0", EAGLES),
    Mutant("eagle: state of the root everywhere", "deeper pairs", "drafters/eagle.py",
           "= self._states[index][parent]", "= self._states[index][ROOT]", EAGLES[:1]),
    Mutant("eagle: own states where the target's belong", "what a pair is fed with", "drafters/eagle.py",
           "features[place, -self._own_size :] =", "features[place, : self._own_size] =",
           tuple(f"{one}[eagle3]" for one in EAGLES)),
    Mutant("eagle: ids ignored", "the vocabulary of the draft", "drafters/model.py",
           "self._ids = drafted[: self._count]", "self._ids = slice(self._count)",
           tuple(f"{one}[eagle3]" for one in EAGLES)),
    Mutant("eagle: no rollback", "pairs of what was drafted stay", "drafters/eagle.py",
           "        self._model.lens[index] -= self._drafted[index]\n", "", EAGLES[:1]),
    Mutant("eagle: features of what was kept are lost", "what a pair is fed with", "drafters/eagle.py",
           "if self._fits(row) else features[:0]", "* 0 if self._fits(row) else features[:0]", EAGLES),
    # Caches and rounds
    Mutant("accepted path not compacted", "the cache holds rejected branches", "kv.py",
           "if kept < len(nodes):", "if False:", (GREEDY_TREES, GENERATIONS + "[block-tree]")),
    Mutant("accepted path compacted to the wrong slot", "the cache holds rejected branches", "kv.py",
           "start + kept)", "start)", (GREEDY_TREES,)),
    Mutant("one token too many is committed", "the cache holds a rejected token", "kv.py",
           "self.lens[row] += len(nodes)", "self.lens[row] += len(nodes) + 1", (GREEDY_TREES, GENERATIONS)),
    Mutant("a row that leaves is not replaced", "the last row reads another's cache", "kv.py",
           "self._kv.move_row(last, row, int(self.lens[last]))", "pass", (GREEDY_TREES,)),
    Mutant("tree fed as a chain", "siblings attend each other", "tree.py",
           "None if self.is_chain else (-1, *(parent + 1 for parent in self.parents))", "None", (GREEDY_TREES,)),
    Mutant("draft's tree fed as another tree", "nodes attend the wrong parents", "drafters/model.py",
           "parent - first if parent >= first", "parent if parent >= first",
           (PROPOSALS + "[other draft-stem-greedy]",)),
    Mutant("draft's rollback off by one", "the draft's cache holds a rejected token", "drafters/model.py",
           "drafted - sum(place == node for place, node in enumerate(kept[:drafted]))",
           "max(0, drafted - 1 - sum(place == node for place, node in enumerate(kept[:drafted])))",
           (PROPOSALS + "[other draft-chain-greedy]",)),
    Mutant("logits of the first nodes are reported", "log-probabilities of trees", "scheduler.py",
           "logits[list(kept)]", "logits[: len(kept)]",
           (GROWTH + "test_logprobs_of_trees_are_those_of_plain_decoding",)),
    Mutant("a block goes on after the end token", "the end of the text", "request.py",
           "            if self.finish_reason:\n                break\n", "", (GENERATIONS,)),
    Mutant("prompt lookup starts one token early", "the draft repeats instead of going on", "drafters/ngram.py",
           "for position in range(source, source + width)", "for position in range(source - 1, source + width - 1)",
           (NGRAM + "test_the_draft_is_what_followed_the_match",)),
    Mutant("the rarer continuation", "what followed most often is drafted", "drafters/ngram.py",
           "(counts[tokens[place]], place)", "(-counts[tokens[place]], place)",
           (NGRAM + "test_what_followed_more_often_wins_over_what_followed_last",)),
    Mutant("the first of equal continuations", "the last one is drafted", "drafters/ngram.py",
           "(counts[tokens[place]], place)", "(counts[tokens[place]], -place)",
           (NGRAM + "test_the_latest_of_equally_frequent_ones_wins",)),
    Mutant("chances do not multiply", "how wide a draft is", "drafters/ngram.py",
           "chance := chance * _acceptance", "chance := _acceptance",
           (NGRAM + "test_the_dearer_a_position_the_narrower_the_draft",)),
    Mutant("the second drafter is asked for all rows", "drafts that are thrown away", "drafters/fallback.py",
           "left = [0 if len(tree) else limit", "left = [limit",
           (FALLBACK + "second_proposes_where_the_first_finds_nothing",)),
    Mutant("both drafters hear what was kept", "the draft's cache", "drafters/fallback.py",
           "self._second.commit(index, row, kept if fell else ())", "self._second.commit(index, row, kept)",
           (FALLBACK + "second_proposes_where_the_first_finds_nothing",)),
    Mutant("a row that leaves takes the other's place", "whose proposal it was", "drafters/fallback.py",
           "        self._fell[index] = self._fell[-1]\n", "",
           (FALLBACK + "second_proposes_where_the_first_finds_nothing",)),
    # Rows that join and leave, and plans
    Mutant("a part of a prompt is taken for the whole", "a row runs before it is filled", "scheduler.py",
           "row.held += len(part)", "row.held = len(row.prompt)",
           (CONTINUOUS + "test_a_prompt_that_comes_in_parts_changes_no_text",)),
    Mutant("what overflowed stays", "NaN in slots that are masked", "kv.py",
           "if spoiled and", "if False and",
           ("tests/test_llm.py::test_what_overflowed_spoils_no_later_request[None-error]",)),
    Mutant("buffers shrink too far", "slots of a row that stays", "kv.py",
           "self._kv.resize(rows, capacity, used)", "self._kv.resize(rows, capacity, used - 1)",
           (CONTINUOUS + "test_buffers_shrink_when_long_rows_have_left",)),
    Mutant("an engine's failure is forgotten", "rows whose caches are unknown go on", "scheduler.py",
           "            for row in rows:\n                row.fail(exc)\n            return\n", "            return\n",
           (CONTINUOUS + "test_an_engine_that_fails_ends_the_rows_of_that_pass_and_no_others",)),
    Mutant("a batch costs what a row costs", "when drafting pays", "controller.py",
           "ms = self.times.ms(rows, ", "ms = self.times.ms(1, ",
           (PLANS + "test_no_plan_is_better",)),
    Mutant("drafting is free", "when another drafter pays", "controller.py",
           "(wide + drafting)", "wide",
           (PLANS + "test_no_plan_is_better", PLANS + "test_prices_are_the_time_of_a_level_at_the_expected_rate")),
    Mutant("what is not tried is never forgotten", "when a drafter is tried again", "controller.py",
           "self._means[key].fade(UNTRIED)", "self._means[key].fade(1.0)",
           (PLANS + "test_a_drafter_that_does_not_pay_is_tried_seldom_at_little_loss",
            PLANS + "test_a_drafter_that_pays_again_is_found_soon")),
    Mutant("what was missed is not taken in", "the draft's cache after others drafted", "drafters/model.py",
           "self._take_in(index, row, unseen - 1)", "self._take_in(index, row, unseen - 2)",
           (PLANS + "test_a_draft_that_comes_back_after_long_has_its_cache_right",)),
    # Medusa heads
    Mutant("state of another token", "heads draft from too early a place", "drafters/medusa.py",
           "(index)[-1:, self._final]", "(index)[:1, self._final]",
           (HEADS + "[chain-greedy-all ids]", KNOWING)),
    Mutant("state of another row", "heads draft for another row", "drafters/medusa.py",
           "states[index] = new[0]", "states[index] = next(iter(states.values()), new[0])",
           (HEADS + "[chain-greedy-all ids]",)),
    Mutant("heads in reverse", "the last head drafts the first token", "drafters/medusa.py",
           "trees[index], logits[level])", "trees[index], logits[-1 - level])",
           (HEADS + "[chain-greedy-all ids]", KNOWING)),
    Mutant("map of ids ignored", "a reduced vocabulary drafts other tokens", "drafters/medusa.py",
           "known[self._ids] =", "known[: len(self._ids)] =", (HEADS + "[chain-greedy-reduced]",)),
    Mutant("q from raw logits of heads", "the heads miss what the request asks for", "drafters/medusa.py",
           "distribution(row, known, history) for", "np.exp(known) / np.exp(known).sum() for",
           (HEADS + "[choices-sampled-all ids]",)),
    Mutant("heads' history without the draft", "the heads miss what the request asks for", "drafters/medusa.py",
           "row.tokens + tree.text(node) for", "list(row.tokens) for",
           (HEADS + "[choices-sampled-all ids]",)),
    Mutant("one distribution for a level", "siblings' children share a history", "drafters/medusa.py",
           "if row.pipeline.ignores_history else", "if True else",
           (HEADS + "[choices-sampled-all ids]",)),
    Mutant("heads' noise of the round", "the heads agree by chance only", "drafters/medusa.py",
           "position=len(histories[0])", "position=len(row.tokens)", (HEADS + "[chain-coupled-all ids]",)),
    Mutant("worth of a sibling from its neighbour", "the chosen tree", "drafters/growth.py",
           "(above * ranks[rank + 1],", "(worth * ranks[rank + 1],",
           (MEDUSA + "test_the_chosen_tree_is_the_best_of_all",)),
    # Layer skipping
    Mutant("the target's rows are not followed", "the draft reads what it held before", "drafters/layerskip.py",
           "        self._borrowed.follow()\n", "",
           (SKIPPING + "test_drafts_are_accepted_and_rejected_and_the_text_stays",)),
    Mutant("drafted slots are lost when the cache grows", "the draft attends to nothing", "kv.py",
           "self._target.reserve(slots, max(used, int(self.lens[: self.rows].max())))", "self._target.reserve(slots)",
           (SKIPPING + "test_drafts_do_not_notice_that_the_cache_grows_under_them",)),
    # Prefix reuse
    Mutant("one slot too few is put back", "a slot that was never written", "kv.py",
           "saved[:, :, :count]", "saved[:, :, : count - 1]", (TURNS + "[plain-greedy]", SHARED + "[plain-greedy]")),
    Mutant("one slot too many counts as put back", "the pending token is in the cache", "kv.py",
           "self.lens[row] = count", "self.lens[row] = count + 1",
           (TURNS + "[plain-greedy]", SHARED + "[plain-greedy]")),
    Mutant("all that was saved is put back", "the cache holds another text's tokens", "scheduler.py",
           "(index, entry.kv, count, len", "(index, entry.kv, entry.kv.shape[2], len",
           (SHARED + "[plain-greedy]",)),
    Mutant("the prefill starts at the beginning", "tokens are in the cache twice", "scheduler.py",
           "row.held = row.stats.reused_tokens = count", "row.stats.reused_tokens = count",
           (TURNS + "[plain-greedy]", SHARED + "[plain-greedy]")),
    Mutant("a row that failed leaves its cache", "nobody knows what it holds", "scheduler.py",
           "if self._prefixes is None or row.error:", "if self._prefixes is None:",
           (PREFIXES + "test_nothing_is_kept_of_a_row_that_failed",)),
    Mutant("more of the draft's cache is put back than is common", "the draft's cache holds another text's tokens",
           "drafters/model.py", "min(count, saved.shape[2])", "saved.shape[2]", (SHARED + "[other-greedy]",)),
    Mutant("eagle: the last common token's pair", "a pair with another text's token", "drafters/eagle.py",
           "min(count - 1, saved.pairs", "min(count, saved.pairs", (REUSE + "[eagle-greedy]",)),
    Mutant("eagle: the last round is not learnt from", "features of what it kept are lost", "drafters/eagle.py",
           "        self._learn(index, row)\n        kv = self._saved(index, count)",
           "        kv = self._saved(index, count)",
           (REUSE + "[eagle-greedy]",)),
    Mutant("eagle: features of other tokens are put back", "what a pair is fed with", "drafters/eagle.py",
           "saved.features[: max(count - saved.pairs, 0)]",
           "saved.features[len(saved.features) - max(count - saved.pairs, 0) :]", (REUSE + "[ngram+eagle-greedy]",)),
    Mutant("no token is left to a pass", "the heads' first draft is missing", "drafters/medusa.py",
           "len(row.prompt) - 2", "len(row.prompt) - 1", (REUSE + "[medusa-greedy]",)),
    Mutant("the most recently used entry goes", "what is in use is evicted", "prefixes.py",
           "self._entries.pop(0)", "self._entries.pop(-2)",
           (PREFIXES + "test_the_least_recently_used_entry_goes_first",)),
    Mutant("the pending token is matched", "a row without a pending token", "prefixes.py",
           "np.asarray(tokens, np.int64)[:-1]", "np.asarray(tokens, np.int64)",
           (PREFIXES + "test_the_longest_common_beginning_is_found",)),
    Mutant("any entry is as good", "the longest beginning is not found", "prefixes.py",
           "length = max(lengths, default=0)", "length = next((one for one in lengths if one >= self.least), 0)",
           (PREFIXES + "test_the_longest_common_beginning_is_found",)),
)  # fmt: skip


class Outcome(NamedTuple):
    """What became of a mutant: `verdict` is killed, SURVIVED or ERROR; `detail` names tests, or what went wrong."""

    mutant: Mutant
    verdict: str
    detail: str
    seconds: float


def copy_tree(folder: Path) -> Path:
    """Copy what tests need, without bytecode, to `folder`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    return folder


def patched(text: str, mutant: Mutant) -> str:
    """Return `text` with the fault. Raises `ValueError` when its place is not there exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"its text is {text.count(mutant.old)} times in runtime/{mutant.file}, not once")
    return text.replace(mutant.old, mutant.new)


def run_tests(copy: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run `tests` against the copy; return pytest's exit code (-1: too slow) and its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(copy / "typing_root"), str(copy / "tests")))
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # two versions of a file within a second have the same bytecode
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those that are not needed take half of a run's time
    options = ("-p", "mutants", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--tb=line", "-rfE")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return -1, f"not done after {SECONDS} seconds"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, code: int, output: str) -> tuple[str, str]:
    """Return verdict and detail of a run of the mutant's tests."""
    idle = [
        test for test in mutant.tests if not re.search(rf"^FAILED {re.escape(test)}(\[| - |$)", output, re.MULTILINE)
    ]
    if code == 0:
        return "SURVIVED", "every test passed: " + ", ".join(mutant.tests)
    if code != 1 or re.search(r"^ERROR ", output, re.MULTILINE):
        return "ERROR", f"pytest ended with {code}: {output.strip()[-600:]}"
    if idle:
        return "SURVIVED", "did not fail: " + ", ".join(idle)
    return "killed", ", ".join(dict.fromkeys(_short(test) for test in mutant.tests))


def attempt(copy: Path, mutant: Mutant) -> Outcome:
    """Plant the fault, run its tests, take it out again."""
    started = time.monotonic()
    path = copy / "runtime" / mutant.file
    text = path.read_text()
    try:
        path.write_text(patched(text, mutant))
        verdict, detail = judge(mutant, *run_tests(copy, mutant.tests))
    except ValueError as exc:
        verdict, detail = "ERROR", str(exc)
    finally:
        path.write_text(text)
    return Outcome(mutant, verdict, detail, time.monotonic() - started)


def _print(line: str) -> None:
    print(line, flush=True)


def run_all(mutants: Sequence[Mutant], jobs: int, say: Callable[[str], None] = _print) -> int:
    """Run all mutants, `jobs` at a time, and print what became of each; return 1 unless all were killed."""
    width = max(len(mutant.name) for mutant in mutants)
    room = max(len(mutant.breaks) for mutant in mutants)
    with TemporaryDirectory(prefix="specdec-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copies.put(copy_tree(Path(folder) / str(job)))

        def on_a_copy(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return attempt(copy, mutant)
            finally:
                copies.put(copy)

        started = time.monotonic()
        unchanged = Path(folder) / "0"
        named = sorted({test for mutant in mutants for test in mutant.tests})
        parts = [part for job in range(jobs) if (part := named[job::jobs])]
        with ThreadPoolExecutor(jobs) as pool:
            for code, output in pool.map(lambda part: run_tests(unchanged, part), parts):
                if code != 0:
                    say(f"mutants: error: pytest ended with {code} without any fault\n{output[-3000:]}")
                    return 1
            found = []
            for outcome in pool.map(on_a_copy, mutants):
                found.append(outcome)
                mutant, verdict, detail, seconds = outcome
                say(f"{mutant.name:{width}}  {mutant.breaks:{room}}  {seconds:4.1f} s  {verdict}: {detail}")
    alive = [outcome for outcome in found if outcome.verdict != "killed"]
    say(f"{len(found) - len(alive)} of {len(found)} mutants killed in {time.monotonic() - started:.0f} s")
    for outcome in alive:
        say(f"{outcome.verdict}: {outcome.mutant.name}")
    return 1 if alive else 0


def _short(test: str) -> str:
    return test.partition("[")[0].removeprefix("tests/")


# --- The plugin


_failed: set[str] = set()  # named tests, by function or by case


def _named(config: pytest.Config, nodeid: str) -> str:
    """The test of the command line that `nodeid` is a case of."""
    return nodeid if nodeid in config.args else nodeid.partition("[")[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _named(item.config, item.nodeid) in _failed:
        pytest.skip("it has failed already")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        _failed.add(_named(item.config, item.nodeid))
    return report


def foreign_modules(folder: Path) -> list[str]:
    """Files of imported `specdec` modules that are not in `folder`."""
    files = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith("specdec.")]
    return [file for file in files if file and not Path(file).resolve().is_relative_to(folder.resolve())]


def pytest_sessionfinish(session: pytest.Session) -> None:
    foreign = foreign_modules(session.config.rootpath)
    if foreign:
        print(f"\nmutants: error: not the copy was tested but {foreign[0]}")
        session.exitstatus = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants of the command line."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants to run (all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (%(default)s)")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N", help="every Nth alone, from number I mod N on"
    )
    args = parser.parse_args(argv)
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"no mutant is called {unknown[0]!r}")
    first, step = args.part
    return run_all([known[name] for name in args.names] or MUTANTS[first % step :: step], args.jobs)


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 0 < int(step) <= len(MUTANTS)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, with N from 1 to {len(MUTANTS)}")
    return int(first), int(step)


if __name__ == "__main__":
    sys.exit(main())
