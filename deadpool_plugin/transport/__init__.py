"""Framed bytes between processes and nodes: deadlines, handshake, checksums. Imports no torch."""
