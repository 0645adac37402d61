"""Collectives that pair: the coordinator asks whether all members of each group have issued the same ones.

signatures.py compares two members. README.md says what follows ("Collectives that do not pair"), and why generation 0
is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import compress

import msgspec

from .api import EndRank
from .context import Context
from .events import Note
from .messages import Calls, Compare, RankCalls, Replace
from .processes import Processes
from .signatures import differences
from .types import NEVER, Generation, NodeId, Rank, SwapPlan, listed

PROVED_AFTER = 3  # steps committed in a generation
MISPAIRS = "members of a group issue different collectives"
_ADVISE_NEW = (
    "A new process must issue the same collectives as the others: look for what the script finds out once and keeps"
)
_ADVICE = "All ranks of a group must issue the same collectives in the same order: correct the script"


class Pairing:
    """The comparison in one generation, as its coordinator makes it: all are asked, and whoever differs goes."""

    def __init__(self, context: Context, processes: Processes) -> None:
        self._ctx, self._processes = context, processes
        self._asked_at = NEVER  # by `Context.awake`
        self._why = ""
        self._ended: frozenset[Rank] = frozenset()
        self._repeated = False  # the newest question was put more than once
        self._judged = False
        self._calls: dict[NodeId, tuple[RankCalls, ...]] = {}
        self.found = False  # somebody differs, and is on its way out; or the job is

    def ask(self, why: str = "", ended: Collection[Rank] = ()) -> None:
        """Ask all, unless they have been asked, no script has `ended` since and no newcomer's answer is lacking."""
        ctx = self._ctx
        self._why = self._why or why  # what is known to differ already, "" if it is only suspected
        # A late answer would be taken for one to the new question, and be older than `ended`.
        current = self._all_answered and not self._repeated
        more = self._judged and not self.found and current and not self._ended.issuperset(ended)
        if self._asked_at == NEVER or more:
            self._calls.clear()
            self._ended = frozenset(ended)  # one that ends later may have been read before
        elif not self._judged or self.found or self.settled:
            return
        else:
            self._repeated = True
        self._asked_at, self._judged = ctx.awake, False
        for node in ctx.world.active:
            ctx.send(node, Compare(ctx.world.generation))

    @property
    def _all_answered(self) -> bool:
        return set(self._ctx.living) & set(self._ctx.world.active) <= self._calls.keys()

    @property
    def answered(self) -> bool:
        asked, waited_s = self._asked_at != NEVER, self._ctx.awake - self._asked_at
        return asked and (self._all_answered or waited_s >= self._ctx.timing.slow_after_s)

    @property
    def settled(self) -> bool:
        """Return whether nobody was asked, or nobody differs and every newcomer's node has answered."""
        nodes = {self._ctx.world.node_of[rank] for rank in self._ctx.unproven}
        return self._asked_at == NEVER or (self._judged and not self.found and nodes <= self._calls.keys())

    def hear(self, sender: NodeId, message: Calls) -> None:
        ctx = self._ctx
        if ctx.leads and message.generation == ctx.world.generation:
            self._calls[sender] = message.ranks
            self._judged = self.found  # an answer that comes late is one all the same
            self.judge()

    def compare(self, calls: Mapping[NodeId, tuple[RankCalls, ...]], ended: Collection[Rank]) -> bool:
        """Judge by `calls`, which were asked for because of a stall. Returns: whether somebody differs."""
        if not self.found:
            self._asked_at = self._ctx.awake if self._asked_at == NEVER else self._asked_at
            self._calls, self._ended = dict(calls), frozenset(ended)
            self._repeated = self._judged = False
            self.judge()
        return self.found or self._ctx.ended

    def read(self, generation: Generation, ranks: Iterable[RankCalls], question: int = 0) -> None:
        ctx = self._ctx
        if generation == ctx.world.generation:
            told = []
            for one in ranks:
                again = ctx.replaced.get(one.rank, generation) < generation
                told.append(msgspec.structs.replace(one, newcomer=one.rank in ctx.unproven, again=again))
            ctx.send(ctx.coordinator, Calls(generation, tuple(told), question))

    def replace(self, message: Replace) -> None:
        ctx, rank = self._ctx, message.rank
        if message.generation == ctx.world.generation and rank in ctx.world.ranks_of(ctx.node):
            if not message.hung:
                ctx.replaced[rank] = message.generation
            if rank not in self._processes.gone:
                ctx.act(EndRank(rank, message.reason))

    def judge(self) -> None:
        """Once all answers are there replace the newcomers that differ, or end the job if that came to nothing
        before."""
        ctx = self._ctx
        if self._judged or not self.answered:
            return
        self._judged = True
        answers = {one.rank: one for ranks in self._calls.values() for one in ranks}
        newcomers = {rank for rank, one in answers.items() if one.newcomer}
        found = differences(answers.values(), newcomers, self._ended)
        if not found and not self._why:
            return
        self.found = True
        blamed = {rank for each in found for rank in each.ranks if rank in newcomers}
        shown = next((each for each in found if blamed & set(each.ranks)), found[0] if found else None)
        if not found:  # whoever has not answered has issued it; its node may be about to be lost
            blamed = {*ctx.unproven} - answers.keys() or newcomers
        again = sorted(rank for rank in blamed & answers.keys() if answers[rank].again)
        what = f"{MISPAIRS}: {shown.what if shown else self._why}"
        if not blamed or again:
            before = f", as before rank(s) {listed(again)} were replaced" if again else ""
            advice = _ADVISE_NEW if blamed else _ADVICE
            ctx.stop(f"{what}{before}; no step since {ctx.newest_committed} is kept. {advice}")
            return
        ctx.emit(Note(what))
        for rank in sorted(blamed):
            ctx.send(ctx.world.node_of[rank], Replace(ctx.world.generation, rank, what))

    def judge_newcomers(self, plan: SwapPlan) -> None:
        """Trust newcomers after PROVED_AFTER committed steps of this generation, which `plan` ends."""
        ctx = self._ctx
        floor = ctx.plan.restore_step if ctx.plan else 0
        proved, own = ctx.committed >= floor + PROVED_AFTER, plan.world.ranks_of(ctx.node)
        since = ctx.world.generation if proved else 0
        ctx.replaced = {rank: when for rank, when in ctx.replaced.items() if rank in own and when >= since}
        before = ctx.world.node_of or (-1,) * len(plan.world.node_of)
        # No loop of ours: there are many ranks.
        moved = compress(range(len(before)), map(int.__ne__, before, plan.world.node_of))
        # A process that ended after this node's promise is replaced although the plan does not say so.
        new = {*moved, *plan.lost_ranks, *self._processes.gone}
        ctx.unproven = (frozenset() if proved else ctx.unproven) | new
