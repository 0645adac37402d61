"""The small GPT that train_gpt.py trains: model, checkpoints, and the parallel layouts it is run in."""
