"""What scheduler and workers speak, and what a request is: below both sides of the connector."""
