"""A head with neither Ray nor a model, which admits hosts. A program, to be run on a lab's host.

It prints a join token when it listens, and runs until it is killed.
"""

import asyncio
import datetime as dt
import sys
import tempfile
from pathlib import Path

from mesh.cluster.admission import Admissions
from mesh.cluster.certificates import Authority, make_certificate
from mesh.cluster.host_facts import read_versions
from mesh.cluster.join_token import JoinToken, encode
from mesh.cluster.members import Members
from mesh.cluster.membership_server import MembershipServer, MembershipService, RayAccess
from mesh.cluster.port_plan import own_part, ray_part
from spanmesh_proto.addresses import join_address, parse_port_range
from stages.weights.virtual_stages import StageCache


async def admit(address: str, ports: str) -> None:
    """Listen at an address, in a range of ports."""
    port_range = parse_port_range(ports)
    certificate = make_certificate(dt.datetime.now(dt.UTC))
    service = MembershipService(
        admissions=Admissions(JoinToken((), "secret", certificate.fingerprint, 2**39)),
        # Nobody listens there.
        ray=RayAccess(join_address(address, ray_part(port_range)[0]), "ray-token"),
        members=Members(),
        cache=StageCache(Path(tempfile.mkdtemp())),
        versions=read_versions(),
        authority=Authority(certificate),
        port_range=port_range,
    )
    server = MembershipServer(service, certificate)
    port = await server.start(address, 0, own_part(port_range))
    service.listens_at(join_address(address, port))
    print(encode(service.token), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(admit(*sys.argv[1:]))
