"""The protocol as a pure state machine: no torch, clock, sockets, threads, randomness or logging in here.

`controller.Controller.step(input, now)` returns the actions the caller carries out; see api.py for both.
"""
