"""The messages between scheduler and workers, and the request: below both sides of the connector."""
