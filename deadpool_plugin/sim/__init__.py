"""The protocol under every schedule: the real controllers of a whole job over simulated time, network and memory.

Rules of this package: it drives core.controller.Controller and never a model of it; everything random comes from one
seed; nobody imports it but the command line and tests. May import core and transport.
"""
