"""The plugin inside a training process: call log and redo, staging, skip mode, the way through a swap (torch)."""
