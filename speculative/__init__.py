"""Pure policy of speculation: proposers, acceptance, the controller. No I/O, no clock, no dice.

Proposers guess what follows (`proposer`), the controller says how much of it is worth sending (`controller`),
the tail verifies, `acceptance` says what became of it and counts.
"""
