"""The operating system of one host: processes, files, addresses, output. Imports no torch, decides nothing of the job."""
