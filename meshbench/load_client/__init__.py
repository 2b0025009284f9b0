"""One client for everything that measures: requests of a schedule, sent by a child process."""
