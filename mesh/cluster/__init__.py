"""Cluster: membership, certificates, links and Ray nodes of the hosts of a mesh."""
