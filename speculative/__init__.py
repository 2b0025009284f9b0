"""Pure policy of speculation: proposers, acceptance, span classes. No I/O, no clock, no dice.

A proposer guesses what follows (`ngram`), the gate says how much of it is worth sending (`gate`), the tail
verifies, `acceptance` says what became of it, `statistics` counts.
"""
