"""Emulated clusters on one machine: how they are started, watched, compared with an undisturbed run and reported on."""
