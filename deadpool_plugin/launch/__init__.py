"""Programs of the launcher: the supervisor of each local rank, the agent of each node, the training process."""
