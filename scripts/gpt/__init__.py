"""The small GPTs that train_gpt.py and train_deepspeed.py train: models, checkpoints, and the parallel layouts."""
