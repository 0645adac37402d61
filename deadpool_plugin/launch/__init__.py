"""What the launcher starts: the supervisor of each local rank, the agent of each node, the training process."""
