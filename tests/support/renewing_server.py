"""A server that renews its certificate all the time. It says its port, and lives while its input is open."""

import asyncio
import datetime as dt
import sys

import grpc

from mesh.cluster.certificates import Authority, make_certificate
from stages.transport.channels import SERVER_OPTIONS, add_port

_RENEWED_EVERY_S = 0.1


async def main() -> None:
    authority = Authority(make_certificate(dt.datetime.now(dt.UTC)))
    identity = authority.own_identity(["studio"], "127.0.0.1")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    sys.stdout.write(f"{add_port(server, '127.0.0.1:0', lambda: identity)}\n")
    sys.stdout.flush()
    await server.start()
    closed = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    while not closed.done():
        await asyncio.wait([closed], timeout=_RENEWED_EVERY_S)
        identity = authority.own_identity(["studio"], "127.0.0.1")
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
