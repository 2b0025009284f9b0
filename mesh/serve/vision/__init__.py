"""Encoders of pictures on other hosts: their placing, process, and replacement when the host is lost."""
