"""The composition root: the one place that puts concrete classes together, for the agent and for a worker.

Rules of this file: imports are inside the functions, so that an agent never loads torch and a supervisor never
loads either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import GenerationChanged

if TYPE_CHECKING:
    import socket

    from .agent.world import Job, Place
    from .config import Config
    from .core import local
    from .transport.unix import LocalConnection
    from .worker.context import Context
    from .worker.output import Mute


def run_agent(place: Place, config: Config, secret: bytes, listener: socket.socket, job_tag: str, job: Job) -> int:
    """One node's agent, from its first connection to its last; the exit code. The process is to end after it: unlike
    asyncio.run this does not wait for threads that a file system which hangs has not let go of."""
    import asyncio
    import signal

    from .agent.links import meeting_s
    from .agent.process import Agent
    from .host.interfaces import reachable
    from .host.machine import Machine
    from .transport.handshake import Credentials

    async def serve() -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)  # the supervisors say it
        target = job.invitation.members[0] if job.invitation else (place.master_addr, place.master_port)
        where, credentials = await reachable(config, target, meeting_s(config)), Credentials(secret)
        machine = Machine(place.node, where, config, credentials, listener, job_tag)
        return await Agent(machine, place, config, credentials, job).run()

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(serve())


def start_live(connection: LocalConnection, config: Config, order: local.RunRank, local_rank: int) -> Context:
    """An active rank's worker: waits until everyone's groups may be built, then is ready for the script.

    Raises: SystemExit once the agent ends a process whose world was over before its script began.
    """
    from .core import local
    from .worker.starting import Starting

    context = _worker_context(connection, config, local_rank)
    try:
        start, _ = context.link.receive(local.StartGroups)
        assert isinstance(start, local.StartGroups)
        context.groups.start(start.generation, start.store)
    except GenerationChanged:  # the world it was for is over, and another process will begin the script
        raise SystemExit(context.wait_for_end()) from None
    context.mode = starting = Starting(context, order.rank, config.header_bytes)
    starting.watch()
    return context


def start_following(
    connection: LocalConnection, config: Config, rehearsal: local.Recording, local_rank: int, mute: Mute
) -> Context:
    """A spare's rehearsal of one rank: the groups answer from the rank's recording."""
    from .worker import codec
    from .worker.file_view import FileView
    from .worker.follow import Follow

    context = _worker_context(connection, config, local_rank, rehearses=True)
    recording, layout_digest, looks = codec.decode(rehearsal.recording)
    context.groups.rehearse(recording)
    context.mode = Follow(context, rehearsal.rank, layout_digest, mute, FileView(looks))
    return context


def _worker_context(connection: LocalConnection, config: Config, local_rank: int, rehearses: bool = False) -> Context:
    from .adapters.deepspeed import extensions
    from .adapters.deepspeed.adapter import DeepSpeedAdapter
    from .adapters.megatron.adapter import MegatronAdapter
    from .comm.groups import Groups
    from .worker.adapter import Adapter
    from .worker.context import Context
    from .worker.link import AgentLink

    groups = Groups(config.recording_limit_bytes, config.phase_timeout_s)
    adapters: list[Adapter] = [MegatronAdapter(), DeepSpeedAdapter()]
    context = Context(AgentLink(connection, groups.generations), groups, adapters, local_rank=local_rank)

    def tell(text: str) -> None:
        if rehearses:  # nobody sees its output, and the job is not protected before it is ready
            context.link.event("Note", text=text)

    extensions.install(tell)  # not with the adapter: DeepSpeed compiles before it initialises torch.distributed
    context.install()
    context.link.start(context)
    context.offer_store()  # at once: if every process of the job is lost, nobody else has one
    return context
