"""The node's process: one asyncio loop around `core.Controller` that turns the world into inputs and acts on answers.

No torch in here. `process.py` is the loop; every other file is one duty of it, and runs on the loop's thread only.
"""
