"""Lab: several hosts on one machine, network namespaces joined by a router that delays every packet."""
