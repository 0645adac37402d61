"""The witness: who is first keeps his plan, for ever; nobody sees a half one; another job's plans are another's."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.hosts import host, local_node

from deadpool_plugin.agent import process
from deadpool_plugin.agent.process import Agent
from deadpool_plugin.core import api
from deadpool_plugin.core.types import SwapPlan, World
from deadpool_plugin.errors import EXIT_CONFIG
from deadpool_plugin.host.files import SharedFolder
from deadpool_plugin.transport.rendezvous import Hello, job_id


def plan(node: int, generation: int = 1) -> SwapPlan:
    return SwapPlan(World(generation, (node,) * 2000, (7,)), 4, (1,), (), f"store of {node}")


def test_the_first_plan_of_a_generation_stays(tmp_path):
    directory = tmp_path / "not" / "there yet"
    folder = SharedFolder(directory)
    assert folder.look("job", 1) is None
    assert folder.keep("job", plan(0)) == plan(0)
    assert folder.look("job", 1) == plan(0)
    assert folder.look("job", 2) is None and folder.look("another job", 1) is None
    assert folder.keep("job", plan(1)) == plan(0)
    assert folder.keep("job", plan(1, generation=2)) == plan(1, generation=2)
    assert folder.keep("another job", plan(1)) == plan(1)
    assert sorted(path.name for path in directory.iterdir()) == ["another job.1", "job.1", "job.2"]


def test_many_at_once_see_one(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        for round in range(10):
            kept = list(
                threads.map(lambda node, job=str(round): SharedFolder(tmp_path).keep(job, plan(node)), range(8))
            )
            assert len({one.store for one in kept}) == 1


def test_a_storage_that_is_not_there_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SharedFolder(tmp_path / "file" / "directory").keep("job", plan(0))


def test_every_start_is_a_job_of_its_own():
    def hello(nonce):
        return Hello(0, "h", ("h", 1), (("h", 2),), 1, {}, "x", nonce)

    assert job_id([hello("a"), hello("b")]) != job_id([hello("a"), hello("c")])


def said_of(monkeypatch: pytest.MonkeyPatch, directory: Path, node: int = 0, joins: bool = False) -> list[api.Input]:
    """Return what a node's agent that checks the witness there gives its controller."""
    fed: list[api.Input] = []
    agent = Agent.__new__(Agent)
    agent._node = local_node(host(witness=SharedFolder(directory)), node=node)
    agent._host = agent._node.host
    monkeypatch.setattr(agent, "feed", fed.append)
    asyncio.run(agent._check_witness(joins))
    return fed


@pytest.mark.parametrize("theirs", ["a", "b"], ids=["shared", "each-host-its-own"])
@pytest.mark.parametrize("joins", [False, True])
def test_hosts_that_see_different_directories_say_so(tmp_path, monkeypatch, theirs, joins):
    monkeypatch.setattr(process, "WITNESS_SHARED_S", 1)
    for name in ("a", theirs):
        (tmp_path / name).mkdir(exist_ok=True)
    assert said_of(monkeypatch, tmp_path / "a") == []
    said = said_of(monkeypatch, tmp_path / theirs, node=1, joins=joins)
    if theirs == "a":
        assert not said and SharedFolder(tmp_path / "a").look("job", 1) is None
        return
    [ended] = said
    assert isinstance(ended, api.NodeGivenUp if joins else api.StopRequested)
    assert "is not the directory that the first host has" in ended.reason and "mount it" in ended.reason


def test_storage_without_hard_links_is_no_witness(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    [ended] = said_of(monkeypatch, tmp_path)
    assert isinstance(ended, api.StopRequested) and ended.exit_code == EXIT_CONFIG
    assert "cannot keep a hard link (Operation not permitted)" in ended.reason
