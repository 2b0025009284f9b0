"""Speculation policy: proposers, acceptance and the controller. Without I/O, clock and randomness.

Proposers guess the next tokens (`proposer`), the controller decides how many of them are sent (`controller`),
the tail verifies them, and `acceptance` judges and counts the result.
"""
