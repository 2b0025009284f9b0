"""Lab: several emulated hosts on one machine, in network namespaces joined by a router with delays."""
