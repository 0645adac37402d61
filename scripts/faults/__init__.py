"""Faults injected into jobs: where and how they strike, the jobs that must survive them, the fault matrix."""
