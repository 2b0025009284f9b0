"""One well-behaved session over the stages under fire: its answers must not change by a bit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mesh.bench.fuzz.stage_process import HOST, MESH_KEY
from mesh.coordinator.stage_streams import VerdictStream
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError
from stages.sampling.sampler import Sampling
from stages.sampling.session_spec import Opening
from stages.transport.stage_link import StageLink

if TYPE_CHECKING:
    from stages.transport.channels import Identity

_PROMPT: Final = (5, 300, 7, 900, 11, 12, 13, 500)
_NUM_STEPS: Final = 4
_SAMPLING: Final = Sampling(temperature=0.7, top_k=40, seed=17, frequency_penalty=0.5)


async def good_session(
    first: str,
    tail: str,
    hello: wire.Hello,
    identity: Identity,
    *,
    session: int,
    slot: int,
    patience_s: float,
) -> bytes:
    """Open a session, decode a few windows, some with proposals that are rejected, and close it.

    Args:
        first: `host:port` of the first stage.
        tail: `host:port` of the tail.
        hello: First message of each stream.
        identity: What to show the stages.
        session: Its id; never used before.
        slot: Where it runs.
        patience_s: For each answer.

    Returns:
        All tokens and logprobs, serialised: the same whenever the stages are well.

    Raises:
        MeshError: If a stream breaks.
        TimeoutError: If an answer does not come.
    """
    verdicts: asyncio.Queue[wire.Verdict | MeshError] = asyncio.Queue()

    def take(verdict: wire.Verdict) -> None:
        if verdict.session == session:
            verdicts.put_nowait(verdict)

    stream = VerdictStream(
        tail, hello, MESH_KEY, on_verdict=take, on_lost=verdicts.put_nowait, host=HOST, identity=identity
    )
    link = StageLink(first, hello, MESH_KEY, verdicts.put_nowait, host=HOST, identity=identity)
    try:
        async with asyncio.timeout(patience_s):
            await stream.open()
            await link.open()
        link.send(Opening(session, slot, _SAMPLING, len(_PROMPT), num_top_logprobs=3).to_wire())
        tokens, start = list(_PROMPT), 0
        answers = []
        for number in range(_NUM_STEPS):
            link.send(
                wire.Window(
                    session=session,
                    epoch=number,
                    id=number,
                    start=start,
                    tokens=tokens,
                    verify_rows=1 if number == 0 else len(tokens),
                )
            )
            async with asyncio.timeout(patience_s):
                verdict = await verdicts.get()
            if isinstance(verdict, MeshError):
                raise verdict
            answers.append(
                b"".join(
                    [
                        bytes(str(list(verdict.tokens)), "ascii"),
                        *(entry.SerializeToString(deterministic=True) for entry in verdict.logprobs),
                    ]
                )
            )
            start += len(tokens) if number == 0 else len(verdict.tokens)
            # The second proposal is hardly ever right.
            tokens = [verdict.tokens[-1], 1, 2]
        return b"\n".join(answers)
    finally:
        await link.close()
        await stream.close()
