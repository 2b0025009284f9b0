"""Pure policy of speculation: proposers, acceptance, span classes. No I/O, no clock, no randomness of its own."""
