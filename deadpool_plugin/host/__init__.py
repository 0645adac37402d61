"""The operating system of one host: processes, /proc, files, addresses, what processes print.

The agent and the launcher's programs use it. No torch in here, and nothing is decided about the job.
"""
