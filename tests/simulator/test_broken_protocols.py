"""The simulator finds bugs: one-line changes of the protocol, each of which must break the right invariant soon."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import ledger, swaps, voter
from deadpool_plugin.core.chain import Chain
from deadpool_plugin.mirror.arena import SlotPair
from simulator.campaign import outcomes
from simulator.schedule import Ranges

SEEDS_MAX = 80


def without_the_gate(patch) -> None:
    patch.setattr(Chain, "may_stage", lambda self, step, committed: True)


def slots_by_the_steps_number(patch) -> None:
    patch.setattr(SlotPair, "slot_of", lambda self, step, keep=-1: step % 2)


def decided_by_one_acceptance(patch) -> None:
    patch.setattr(swaps.Proposal, "is_decided", lambda self, world, witness: bool(self.accepted))


def promised_before_the_fence(patch) -> None:
    patch.setattr(voter.Voter, "fence_generation", lambda self: None)


def committed_unpaired(patch) -> None:
    patch.setattr(ledger.Ledger, "_is_paired", lambda self, world, step, nodes: True)


@pytest.mark.parametrize(
    ("bug", "invariant"),
    [
        (without_the_gate, "RESTORABLE"),
        (slots_by_the_steps_number, "RESTORABLE"),
        (decided_by_one_acceptance, "ONE_WORLD_PER_GENERATION"),
        (promised_before_the_fence, "NO_STALE_WRITE"),
        (committed_unpaired, "BIT_EXACT"),
    ],
)
def test_a_broken_protocol_is_caught(bug, invariant, monkeypatch):
    bug(monkeypatch)
    findings = (one.finding for one in outcomes(range(SEEDS_MAX), Ranges(nodes=(5, 7))))
    assert any(finding is not None and finding.invariant == invariant for finding in findings)
