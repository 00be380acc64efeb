"""The memory for snapshots as a rank has mapped it, and copies between it and devices.

Forbidden here: deciding when to save, talking to the agent."""
