"""Process groups that outlive their members: stable handles, recorded start-up collectives, interruptible waits.

Rules of this package: imports torch, and of ours only errors, transport and core.
"""
