"""The agent: one asyncio loop around the controller. Collects inputs, steps, carries out the actions in their order.

Rules of this file: nothing is decided here and nothing waits here between an input and its actions; each message and
each action goes to the part whose duty it is. An input that comes while another's actions are being carried out waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import traceback
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from .. import events
from ..config import Config
from ..core import api, local
from ..core.controller import Controller
from ..core.messages import Goodbye, RankCalls, Verdict
from ..core.types import NO_STEP, Generation, Rank, SwapPlan, World, listed
from ..errors import (
    EXIT_CONFIG,
    EXIT_FENCED,
    EXIT_OK,
    ConfigError,
    DeadpoolError,
    InvariantViolated,
    StaleGeneration,
    present,
)
from ..host.files import CONTACTS_FOLDER
from ..host.machine import Machine
from ..host.output import Cuts
from ..host.proc import described_exit
from ..mirror.disk import claim
from ..transport.flight_recorder import read_calls, read_place
from ..transport.handshake import Credentials
from ..transport.rendezvous import Hello
from ..transport.tasks import Tasks, begin, call_at_multiple, soon
from ..transport.unix import LocalPeer, close_descriptors
from .links import Links
from .mirroring import Mirroring
from .node import LocalNode, Slot
from .rehearsals import Rehearsals
from .reports import Reports
from .storage import Beginning, Storage, beginning
from .takeovers import TakeOvers
from .workers import Workers
from .world import Job, Place, described, described_supply, form_world, policy_of, rack_named, timing_of

WORKERS_KILL_S = 0.5
SUPERVISORS_END_S = 4.0
WITHDRAW_S = 1.0
WITNESS_RETRY_S = 1.0
WITNESS_SHARED_S = 120  # attribute caches of NFS last a minute by default


class Agent:
    """One node's agent; `run` once, on the loop on which it was made."""

    def __init__(self, host: Machine, place: Place, config: Config, credentials: Credentials, job: Job) -> None:
        self._host, self._config = host, config
        self._in_job = job.invitation is None  # a host that joins may have another host's node id until it has asked to
        self._verdict: Verdict | None = None
        self._inputs: deque[api.Input] = deque()
        self._stepping = False
        self._commands = 0  # runs of `spare_command` so far
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._left: asyncio.Future[int] = self._loop.create_future()
        self._reports = Reports(place.node, host.output, config.output_dir)
        self._cuts = Cuts(place.node, host.output, config.output_dir, lambda: credentials.job)
        node = self._node = LocalNode(place, host, config, credentials, job, self._reports, self.feed)
        self._controller = Controller(place.node, timing_of(config), policy_of(config))
        self._links = Links(node)
        self._mirroring = Mirroring(node)
        self._workers = Workers(node, lambda slot: self._rehearsals.replace(slot))
        self._rehearsals = Rehearsals(node, self._workers, self._mirroring)
        self._storage = Storage(node)
        self._takeovers = TakeOvers(node, self._workers, self._mirroring, self._rehearsals)
        host.serve(self._on_message, self._workers.closed)
        host.store.on_corrupt(lambda rank, step: soon(self._loop, self.feed, api.HoldingsDropped(rank, step - 1)))
        self._loop.set_exception_handler(lambda _, context: self._unhandled(context))
        reason = f"the agent of node {place.node} was told to end (SIGTERM)"
        self._loop.add_signal_handler(signal.SIGTERM, self._workers.told_to_end, reason)

    async def run(self) -> int:
        """Run from the first connection to the last. Returns: the exit code."""
        alive, starting = [asyncio.create_task(self._guarded(work)) for work in (self._say_alive(), self._start())]
        self._ticking: asyncio.Handle = self._loop.call_soon(self._tick)
        try:
            exit_code = await self._left
            self._ticking.cancel()
            starting.cancel()
            return await self._end(exit_code)
        finally:
            alive.cancel()
            self._host.end()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        """Report an error nobody can handle, and leave; to the others this node is lost."""
        if not isinstance(error, DeadpoolError) or isinstance(error, InvariantViolated):
            traceback.print_exception(error)
        if self._controller.world is None or self._left.done():
            self._reports.say(f"node {self._node.id}: {error}")
        else:
            self._reports.emit(events.NodeFenced(reason=f"its agent failed: {error!r}"))
        self._leave(api.Leave(getattr(error, "exit_code", EXIT_FENCED), str(error)))

    def _unhandled(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            self._reports.emit(events.Note(text=str(context.get("message"))))
        else:
            self._broke(error)

    async def _start(self) -> None:
        """Meet the others, link up, and let the controller begin. Raises: DeadpoolError."""
        node, config, joins = self._node, self._config, not self._in_job
        resume = config.resume if not joins else None
        stored = await self._host.at_files(lambda: self._storage.look(resume)) if resume is not None else None
        hello = await self._links.listen(stored)
        members = await self._links.join(hello) if joins else ()
        hellos = await self._links.meet(hello) if not joins else []
        self._tasks.start(self._publish(hello))  # the file system may hang
        self._tasks.start(self._check_witness(joins))
        if config.spare_command is not None:
            self._tasks.start(self._check_spare_command())
        if joins:  # the job runs already: this host's first world is that of the plan that takes it in
            self._in_job = True
            self._reports.emit(events.NodeJoined(host=self._host.name, ranks=(), spare=True))
            return self.feed(api.Joining(members, rack_named(node.id, self._host.name, config.racks)))
        try:
            world = form_world(hellos, config)
            command, copies = self._storage.command, config.copies
            begins = beginning(world, hellos, command, copies) if resume is not None else None
        except ConfigError as error:  # all come to the same conclusion, and one says it
            if node.id == 0:
                raise
            return self._leave(api.Leave(error.exit_code, str(error)))
        if resume is not None:
            await self._host.at_files(lambda: claim(resume, node.credentials.job))
        self._mirroring.enter(world)
        self._workers.form(world, begins=begins is None)
        self.feed(api.WorldFormed(world, begins.step if begins is not None else NO_STEP))
        if begins is not None:
            self._tasks.start(self._resume(world, begins))
        if node.id == 0:
            hosts = [f"{one.host} ({', '.join(address for address, _ in one.bulk)})" for one in hellos]
            lines = [*described(world, hosts), self._links.how_to_join]
            if config.spare_command is not None:
                lines.append(described_supply(config))
            if self._reports.follows_another_job:
                said = "has files of an earlier job; this job's lines are added to them"
                lines.append(f"output_dir {config.output_dir.absolute()} {said}")
            for line in lines:
                self._reports.say(line)
        ranks = world.ranks_of(node.id)
        self._reports.emit(events.NodeJoined(host=self._host.name, ranks=ranks, spare=not ranks))

    async def _resume(self, world: World, begins: Beginning) -> None:
        """Read this node's part of an earlier job, and have its ranks rehearsed; the controller does the rest."""
        me, store = self._node.id, self._host.store
        if me == 0:
            self._reports.emit(events.JobResumed(step=begins.step, path=str(self._config.resume)))
            if begins.passed:
                self._reports.emit(events.Note(text=f"newer files are not enough to go on from: {begins.passed}"))
        try:
            await self._storage.read(world, begins)
        except ConfigError as error:
            return self.feed(api.StopRequested(f"node {me}: {error}", EXIT_CONFIG))
        except StaleGeneration:
            return
        for slot in self._node.slots if store.generation == world.generation else ():
            if slot.rank >= 0:
                readers = begins.readers(world, slot.rank, self._config.copies)
                others = readers - {me} or readers  # where this host's own files are damaged
                self._rehearsals.resume(slot, me if slot.rank in store.recordings else min(others))

    async def _publish(self, hello: Hello) -> None:
        node = self._node
        try:
            await self._host.at_files(lambda: self._host.publish(hello, node.job.secret_files, node.credentials.job))
        except OSError as error:  # a full disk is not worth a node
            folder = self._config.output_dir / CONTACTS_FOLDER
            self._reports.say(f"node {node.id} is not in {folder} ({error.strerror}): only `--to` finds it there")

    async def _check_witness(self, joins: bool) -> None:
        """Check that this host and the first one see the same directory, and that it can have hard links."""
        job, witness = self._node.credentials.job, self._host.witness
        if witness is None:
            return
        expected, remedy = "a directory on storage that all hosts share", "name one, or mount it on this host"
        found = f"the witness {witness} on {self._host.name} is not the directory that the first host has there"
        if self._node.id == 0 and not joins:
            try:
                return await self._host.at_files(lambda: witness.share(job))
            except OSError as error:
                found = f"the witness {witness} cannot keep a hard link ({error.strerror})"
                expected, remedy = f"{expected}, and that has them", "name another"
        else:
            for _ in range(WITNESS_SHARED_S):
                await asyncio.sleep(1.0)  # an NFS client that looks too early remembers for long that there is nothing
                with contextlib.suppress(OSError):
                    if await self._host.at_files(lambda: witness.is_shared(job)):
                        return
        reason = str(ConfigError(found, expected, remedy))
        self.feed(api.NodeGivenUp(reason) if joins else api.StopRequested(reason, EXIT_CONFIG))

    async def _claim(self, plan: SwapPlan) -> None:
        """Feed the plan that the witness keeps, `plan` unless it had one before; try until the storage answers."""
        job, witness = self._node.credentials.job, present(self._host.witness, "a plan is claimed without a witness")
        while True:
            try:
                return self.feed(api.Claimed(await self._host.at_files(lambda: witness.keep(job, plan))))
            except (OSError, msgspec.MsgspecError) as error:
                self._reports.emit(events.Note(f"the witness in {witness} does not answer: {error}"))
            await asyncio.sleep(WITNESS_RETRY_S)

    async def _look(self, generation: Generation) -> None:
        job, witness = self._node.credentials.job, present(self._host.witness, "a plan is sought without a witness")
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if (kept := await self._host.at_files(lambda: witness.look(job, generation))) is not None:
                self.feed(api.Claimed(kept))

    async def _bring(self, hosts: int) -> None:
        """Run `spare_command` for so many hosts, and feed how it has ended."""
        commands = self._config.spare_commands(self._links.address, hosts)
        ends = await asyncio.gather(*(self._run_spare_command(words) for words in commands))
        failures = [said for well, said in ends if not well]
        said = failures[0] if failures else ends[-1][1]
        self.feed(api.SpareCommandEnded(len(failures) * hosts // len(commands), said))

    async def _run_spare_command(self, words: list[str]) -> tuple[bool, str]:
        """Returns: whether it has ended well; its last line of output, or why it has not."""
        self._commands += 1
        limit_s = self._config.spare_command_limit_s
        file = self._config.output_dir / f"spare_command{self._commands}.node{self._node.id}.log"
        try:
            exit_code, said = await self._host.run_command(words, file, limit_s)
        except OSError as error:
            return False, f"it could not be started ({error.strerror or f'no answer from the storage of {file}'})"
        if exit_code == 0:
            return True, said or "no output"
        how = f"it was ended, as it still ran after {limit_s:g} s"
        return False, f"{how if exit_code is None else described_exit(exit_code)}; {file.name}: {said or 'no output'}"

    async def _check_spare_command(self) -> None:
        program, host = self._config.spare_commands("", 1)[0][0], self._host
        if not await host.at_files(lambda: host.has_program(program)):
            said = f"node {self._node.id}: there is no program {program} on {host.name}, which spare_command names"
            self._reports.say(said)

    def _tick(self) -> None:
        self._ticking = call_at_multiple(self._loop, self._config.tick_s, self._tick)
        self.feed(api.Ticked())
        self._reports.await_ranks(self._controller.awaited, self._controller.world, self._loop.time())

    async def _say_alive(self) -> None:
        # A job that waits, or is slow, shall not be taken for one that is gone; after the training each node says so.
        while True:
            await asyncio.sleep(events.ALIVE_S)
            if self._controller.world is not None and (self._workers.ending or self._controller.leads):
                self._reports.emit(events.Alive())

    def feed(self, event: api.Input) -> None:
        """Give the controller one input and carry out what it says."""
        self._inputs.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inputs:
                for action in self._controller.step(self._inputs.popleft(), self._loop.time()):
                    self._carry_out(action)
        except Exception as error:  # not the sender's fault
            self._broke(error)
        finally:
            self._stepping = False

    def _on_message(self, peer: LocalPeer, message: local.LocalMessage, descriptors: list[int]) -> None:
        if isinstance(message, local.SupervisorHello):
            self._workers.supervisor(peer, message, descriptors)
        elif isinstance(message, local.StandbyHello):
            self._workers.standby(peer, message)
        elif isinstance(message, local.WorkerHello):
            self._workers.worker(peer, message)
            if isinstance(peer.tag, Slot) and (process := peer.tag.of_peer(peer)):  # else it has been overtaken
                self._rehearsals.introduced(peer, process)
        elif not isinstance(peer.tag, Slot):
            close_descriptors(descriptors)
        elif isinstance(message, local.RehearsalOutput):
            self._workers.outputs.assign_rehearsal(peer.tag.of_peer(peer), descriptors)
        elif isinstance(message, local.StackFile):
            self._workers.stack_file(peer.tag, peer, descriptors)
        else:
            self._heard(peer.tag, peer, message)

    async def _prepare(self, slot: Slot, peer: LocalPeer, profile: local.RankReady) -> None:
        await self._mirroring.prepare(slot, peer, profile)
        self._workers.tell_snapshots(peer)  # its chain begins with its arena, and others may be ahead, in a save

    def _heard(self, slot: Slot, peer: LocalPeer, message: local.LocalMessage) -> None:
        process = slot.of_peer(peer)
        match message:
            case local.RankReady():
                self._workers.tell_imports(slot, message.modules)
                self._tasks.start(self._prepare(slot, peer, message))
            case local.Staged():
                self._mirroring.staged(message)
            case (
                local.WorkerMoved() | local.WorkerFinished() | local.CheckpointSaved() | local.ConnectionBroke()
                | local.Wanted() | local.Passed()
            ):  # fmt: skip
                self.feed(message)
            case local.Unwound(generation=generation) if process:  # it waits for its new world
                process.unwound_for = max(process.unwound_for, generation)
            case local.Saving(generation=generation) if process:
                process.saving_for = max(process.saving_for, generation)
            case local.WorkerRestored(generation=generation) if process:
                process.unwound_for, process.in_training = max(process.unwound_for, generation), True
                self.feed(message)
            case local.Rehearsed() if process:
                self._rehearsals.rehearsed(process, message)
            case local.Parked() if process:
                self._rehearsals.parked(process, message)
            case local.Moved():
                if process is slot.process:
                    self._rehearsals.moved(slot, message)
            case local.Failing() if process:
                self._rehearsals.failing(slot, process, message)
            case local.StoreOffer() if process:
                self._workers.store_offer(slot, process, message)
            case local.OutOfReach() if process:  # another goes on here, by the records of the steps it need not redo
                self._workers.kill(slot, process, message.reason)
            case local.WorkerEvent(kind=kind, fields=fields):
                self._cuts.heard(slot.pipe, kind, fields)
                self._reports.worker_event(kind, fields)
            case local.WorkerExited(order=order, exit_code=exit_code):
                if (ended := slot.of_order(order)) is not None:
                    self._workers.ended(slot, ended, exit_code)
            case local.StandbyExited(exit_code=exit_code):
                self._workers.standby_ended(slot, described_exit(exit_code))
            case local.CannotEnd():
                self._workers.give_up(f"local rank {slot.local_rank} cannot get a new process: {message.reason}")
            case local.Leaving():
                self._workers.leaving(message)
            case _:
                raise InvariantViolated(f"{type(message).__name__} came from local rank {slot.local_rank}")

    def _carry_out(self, action: api.Action) -> None:
        match action:
            case api.Send():
                self._links.send(action.to, action.message)
            case api.AskHost():
                self._links.mesh.ask(action.node, self._config.patience_s)
            case api.StartWorkers():
                self._workers.start_groups(action.world.generation, action.store)
            case api.StartRehearsal():
                self._rehearsals.order(self._node.slots[action.local_slot], action.rank, action.source)
            case api.EndRehearsal():
                self._rehearsals.end(self._node.slots[action.local_slot], action.rank)
            case api.Commit(step, snapshots, void):
                self._workers.commit(step, snapshots, void)
                self._rehearsals.committed(step)
                self._mirroring.committed(step)
            case api.WriteStep(step):
                self._storage.write(self._controller.generation, step)
            case api.StepStored(step):
                self._storage.stored(step)
            case api.Announce(snapshots, void):
                self._workers.announce(snapshots, void)
            case api.AbortWorkers(generation=generation):
                self._takeovers.cancel()
                self._host.store.announce(generation)  # so that all can know before the first of them is cut off
                self._workers.abort(generation)
                if not self._workers.paused:
                    self._workers.await_unwinding(generation)
                self._host.store.fence(generation)
            case api.PauseWorkers():
                self._workers.pause()
            case api.ResumeWorkers():
                self._workers.resume()
                self._workers.await_unwinding(self._host.store.generation)  # who has not yet has its time from now on
            case api.ReadCalls():
                if action.stacks:
                    self._tasks.start(self._read_stacks(action))
                else:
                    self._read_calls(action, {})
            case api.EndRank():
                for slot in self._node.slots:
                    if slot.rank == action.rank and slot.living is not None:
                        self._workers.kill(slot, slot.living, action.reason)
            case api.RunSpareCommand():
                self._tasks.start(self._bring(action.hosts))
            case api.Claim():
                self._tasks.start(self._claim(action.plan))
            case api.Look():
                self._tasks.start(self._look(action.generation))
            case api.Reconfigure(plan=plan):
                self._reports.generation = plan.world.generation
                self._takeovers.act(plan)
                self._links.missed.clear()
                for lost in plan.lost_nodes:
                    self._links.mesh.drop(lost)
                    self._links.gone(lost)
                self._links.entered()
                self._tasks.start(self._host.bulk.forget(plan.lost_nodes))
            case api.LookAround(nodes=nodes):
                self._tasks.start(self._links.mesh.look_around(nodes))
            case api.Emit(event=event):
                self._reports.leads = self._controller.leads
                self._reports.emit(event)
                if isinstance(event, events.NodeLost):
                    self._links.missed |= {*event.lost}
                if isinstance(event, (events.WaitingForHost, events.SwapDone, events.SpareCommandExhausted)):
                    left = len(self._controller.world.spares) if self._controller.world is not None else 0
                    self._reports.say(f"spares left: {left}; {self._links.how_to_join}")
            case api.Leave():
                self._leave(action)

    def _read_calls(self, action: api.ReadCalls, stacks: Mapping[Rank, tuple[str, ...]]) -> None:
        own = ((slot.rank, self._host.store.own(slot.rank)) for slot in self._node.slots if slot.rank >= 0)
        ranks = [
            RankCalls(
                rank,
                read_calls(pair.calls, action.generation),
                place=read_place(pair.calls),
                stack=stacks.get(rank, ()),
            )
            for rank, pair in own
            if pair is not None
        ]
        self.feed(api.CallsRead(action.generation, tuple(ranks), action.question))

    async def _read_stacks(self, action: api.ReadCalls) -> None:
        slots = [slot for slot in self._node.slots if slot.rank in action.stacks]
        stacks = await asyncio.gather(*map(self._workers.stack, slots))
        self._read_calls(action, {slot.rank: stack for slot, stack in zip(slots, stacks, strict=True)})

    def _leave(self, action: api.Leave) -> None:
        if not self._left.done():
            self._verdict = action.verdict
            self._left.set_result(action.exit_code)

    async def _end(self, exit_code: int) -> int:
        """End the links, the workers and the supervisors; every wait but one has a deadline. Returns: the exit code."""
        workers, node = self._workers, self._node.id
        self._host.end_commands()
        self._takeovers.cancel()
        self._rehearsals.drop()
        workers.end(exit_code)
        goodbye = Goodbye(self._controller.generation, self._verdict) if exit_code != EXIT_FENCED else None
        await self._links.mesh.close(goodbye)
        withdrawing = begin(self._host.at_files(self._host.withdraw))
        if exit_code == EXIT_OK:
            exit_code = await self._last_work()  # which may still fail
        else:
            await workers.wait(lambda: workers.workers_gone, WORKERS_KILL_S)
            if not self._controller.resumes:  # else all of it is on disk as it was
                await self._storage.flush(self._controller.generation, self._controller.newest_committed)
        await workers.end_supervisors(exit_code, SUPERVISORS_END_S)
        await workers.outputs.drain(WORKERS_KILL_S)
        await self._host.close()
        await asyncio.wait([withdrawing], timeout=WITHDRAW_S)  # the file system may hang
        if dropped := self._host.output.dropped_bytes:
            self._reports.say(f"node {node}: {dropped} bytes of output could not be written")
        if self._in_job:
            self._reports.emit(events.NodeEnded(exit_code=exit_code))
        return exit_code

    async def _last_work(self) -> int:
        """Wait for what scripts still do after the training, however long. Returns: their worst exit code."""
        workers, node, timeout_s, told = self._workers, self._node.id, self._config.decision_timeout_s, False
        while not await workers.wait(lambda: not workers.at_work, timeout_s):
            if not told:
                told, ranks = True, listed(sorted(workers.at_work))
                self._reports.say(f"node {node}: training is over; the script(s) of rank(s) {ranks} still run")
        if await workers.wait(lambda: workers.workers_gone, timeout_s) or not (held := workers.unended):
            return workers.late_exit_code
        ranks = listed(sorted(held))
        self._reports.say(f"node {node}: the process(es) of rank(s) {ranks} did not end and are killed")
        return workers.late_exit_code or 1
