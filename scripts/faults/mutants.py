"""One-line bugs of the protocol, for scripts/mutants.py.

Rules of this file: `old` occurs once in `file` (below deadpool_plugin/); with `new` in its place the program runs.
`why` says what comes of it.

Left out, for they change nothing: what guards against what cannot come about. Holdings of lost nodes (a plan's ledger
is made of survivors' promises), a committed step without a payload elsewhere (header and payload of one push arrive
together, and replicas are at home before a step is committed), an acceptance by somebody who has not promised (a plan
is proposed once all have).
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    why: str


MUTANTS = (
    Mutant(
        "gate-removed", "core/chain.py",
        "return before <= 0 or committed >= before", "return True",
        "a slot is written again while the step in it may be needed",
    ),
    Mutant(
        "gate-off-by-one", "core/chain.py",
        "return before <= 0 or committed >= before", "return before <= 1 or committed >= before - 1",
        "two slots hold two steps, not three",
    ),
    Mutant(
        "copies-off-by-one", "core/placement.py",
        "for hop in range(1, min(copies + 1, len(ring))))", "for hop in range(1, min(copies, len(ring))))",
        "one mirror fewer than the job was promised",
    ),
    Mutant(
        "served-unverified", "mirror/store.py",
        "            if sums:\n", "            if False:\n",
        "what was read is acknowledged, or restored, without a look at its checksum",
    ),
    Mutant(
        "majority-off-by-one", "core/types.py",
        "return 2 * present > total or", "return 2 * present >= total - 1 or",
        "two worlds may be decided in one generation",
    ),
    Mutant(
        "stands-still-only-before-a-swap", "core/contact.py",
        "if ctx.ended or not ctx.has_trained:", "if ctx.ended or ctx.swapping or not ctx.has_trained:",
        "who is fenced, cut off and in a call that cannot be interrupted is replaced while it still runs",
    ),
    Mutant(
        "newest-store-only", "agent/workers.py",
        "for address in stores if not self.ending else ():", "for address in stores[-1:] if not self.ending else ():",
        "groups are to be built over a store of a process that is gone, and nobody says so",
    ),
    Mutant(
        "complaint-said-once", "core/controller.py",
        "if event.silent and node in ctx.watch.silent:", "if False:",
        "a job whose nodes cannot mirror to each other any more waits for ever",
    ),
    Mutant(
        "decided-by-one", "core/swaps.py",
        "return world.is_quorum(self.accepted, witness) or", "return bool(self.accepted) or",
        "one acceptance decides",
    ),
    Mutant(
        "plan-before-all-promised", "core/swaps.py",
        "proposal.is_complete(ctx.world):", "ctx.world.is_quorum(proposal.promises):",
        "the plan, or the verdict, does not know all that survives",
    ),
    Mutant(
        "accepted-plan-not-inherited", "core/swaps.py",
        "plan = proposal.inherited() or plan_swap(", "plan = plan_swap(",
        "what an earlier proposer may have decided is decided otherwise",
    ),
    Mutant(
        "promised-twice", "core/voter.py",
        "if ballot < self.promised:", "if False:",
        "a voter promises a smaller ballot after a larger one, and accepts it",
    ),
    Mutant(
        "accepted-against-its-promise", "core/voter.py",
        "if not self.prepare(ballot):", "if self.prepare(ballot) and False:",
        "a voter accepts what it has promised not to accept",
    ),
    Mutant(
        "promised-before-the-fence", "core/voter.py",
        "            self.fence_generation()\n            self.answer()\n",
        "            self.answer()\n            self.fence_generation()\n",
        "what a promise says this node holds may change behind it",
    ),
    Mutant(
        "witness-not-asked", "core/swaps.py",
        "if self._needs_witness(proposal):", "if False:",
        "half of the members go on, or cannot, without the witness",
    ),
    Mutant(
        "impatient-voter", "core/voter.py",
        "if self._hears_who_is_silent(message):", "if False:",
        "a coordinator whose lease runs is replaced",
    ),
    Mutant(
        "lease-too-long", "core/policy.py",
        "return 0.9 * self.silent_after_s", "return 1.5 * self.silent_after_s",
        "a node that is cut off still runs when it is replaced",
    ),
    Mutant(
        "never-paused", "core/contact.py",
        "if ctx.in_contact:", "if True:",
        "a node that is cut off does not stop",
    ),
    Mutant(
        "snapshot-of-an-older-generation", "core/processes.py",
        "if generation != current and not (generation < current and holding.step <= self._floor):", "if False:",
        "a snapshot of a history that did not happen counts as this one's",
    ),
    Mutant(
        "undone-snapshots-kept", "core/processes.py",
        "self._held = {key: holding for key, holding in self._held.items() if key[1] <= plan.restore_step}", "pass",
        "steps that were undone count as held",
    ),
    Mutant(
        "postponed-in-silence", "core/voter.py",
        "            for sender in self._postponed:\n", "            for sender in ():\n",
        "a voter that may not promise yet is taken for lost by who asks it",
    ),
    Mutant(
        "unaware-in-silence", "core/controller.py",
        "        if not ctx.leads:\n            # `sender`", "        if False:\n            # `sender`",
        "a node that does not know yet that it leads is taken for lost",
    ),
    Mutant(
        "tie-without-asking", "core/swaps.py",
        "if others and ctx.now", "if False and ctx.now",
        "who has missed a decision gives up for want of a majority it has",
    ),
    Mutant(
        "store-used-twice", "core/processes.py",
        "        self.consume(plan.store)\n", "",
        "groups are to be built over a store that was built upon before",
    ),
    Mutant(
        "behind-the-newcomer", "core/swaps.py",
        "oldest = ctx.plan.restore_step if ctx.plan is not None else 0", "oldest = 0",
        "a process is asked to redo calls from before it took over",
    ),
    Mutant(
        "stale-plan", "core/controller.py",
        "if plan.world.generation <= self.generation:", "if plan.world.generation < self.generation:",
        "a plan that is carried out already is carried out again",
    ),
    Mutant(
        "left-out-and-stays", "core/controller.py",
        "if ctx.node not in plan.world.members:", "if False:",
        "a node that was replaced goes on",
    ),
    Mutant(
        "restored-in-an-older-generation", "core/processes.py",
        "if generation == ctx.world.generation and not ctx.swapping:", "if True:",
        "a rank counts as being in training that has still to restore",
    ),
    Mutant(
        "committed-not-stepped-back", "core/context.py",
        "self.newest_committed = plan.restore_step  #", "pass  #",
        "a step that was undone counts as committed in the next plan",
    ),
    Mutant(
        "committed-of-an-older-generation", "core/controller.py",
        "if message.generation != ctx.world.generation or sender in ctx.watch.evidence:",
        "if sender in ctx.watch.evidence:",
        "the gate is opened by a word of a history that did not happen",
    ),
    Mutant(
        "new-store-not-promised", "core/controller.py",
        "if self._processes.take_in(event) and ctx.swapping:", "if self._processes.take_in(event) and False:",
        "a store that is offered late is never built upon",
    ),
    Mutant(
        "failure-not-promised", "core/voter.py",
        "failed=self._processes.failures,", "failed=(),",
        "a plan does not name the ranks that have no process",
    ),
    Mutant(
        "spare-taken-twice", "core/placement.py",
        "if node not in takers and spare not in takers.values():", "if node not in takers:",
        "two lost nodes' ranks go to one spare",
    ),
    Mutant(
        "verdict-not-told", "core/context.py",
        "            if node != self.node:\n                self.send(node, verdict)\n",
        "            pass\n",
        "whoever ends the job is the only one to know",
    ),
    Mutant(
        "own-pause-blamed-on-others", "core/controller.py",
        "if gap_s > self._own_pause_s:", "if False:",
        "a node that stood still counts all others as silent",
    ),
    Mutant(
        "no-budget", "core/policy.py",
        "if len(spent) >= self._most:", "if False:",
        "a process that ends again and again is replaced for ever",
    ),
    Mutant(
        "budget-window-ignored", "core/policy.py",
        "while spent and now - spent[0] >= self._window_s:", "while False:",
        "losses long ago count",
    ),
)  # fmt: skip
