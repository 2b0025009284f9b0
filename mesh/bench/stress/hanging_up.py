"""A request whose client may close the connection before the end of the answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh.bench.serve.record import HUNG_UP, Failure

if TYPE_CHECKING:
    from mesh.bench.serve.client import Client
    from mesh.bench.stress.checked_reading import CheckedReading


async def ask_until(client: Client, path: str, body: bytes, reading: CheckedReading) -> Failure | None:
    """Ask, and close the connection at the reading's moment unless the answer has ended before.

    Args:
        client: Asks.
        path: From `/v1` on.
        body: JSON.
        reading: Takes the answer; its `on_progress` is set.

    Returns:
        A failure of kind `hung_up` if the client left; otherwise what `Client.ask` returns.
    """
    moment = reading.moment
    if moment is None:
        return await client.ask(path, body, reading)
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if timer is None and len(reading.token_ids) >= moment.num_tokens:
            timer = loop.call_later(moment.after_s, asking.cancel)

    reading.on_progress = look
    # Cancelled while it waits for the response, it aborts the connection.
    asking = loop.create_task(client.ask(path, body, reading, on_sent=look))
    try:
        await asyncio.wait([asking])
    finally:
        asking.cancel()
        if timer is not None:
            timer.cancel()
    if asking.cancelled():
        return Failure(HUNG_UP, "the client closed the connection, as it was told to")
    return asking.result()
