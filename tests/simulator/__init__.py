"""Whole simulated jobs: every host's real agent, over simulated time, network, processes and memory.

Rules of this package: the world is faked and never the subject (agent/, core/, mirror/'s books, transport/'s control
links). Everything random comes from one seed.
"""
