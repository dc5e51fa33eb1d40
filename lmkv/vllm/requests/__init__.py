"""One request as the scheduler side sees it: options, chunk keys, waits, and the reason of a miss."""
