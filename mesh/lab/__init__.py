"""Several hosts on one machine: network namespaces joined by a router that delays every packet."""

from mesh.lab.hosts import Lab
from mesh.lab.support import lab_supported
from mesh.lab.traffic import Traffic

__all__ = ["Lab", "Traffic", "lab_supported"]
