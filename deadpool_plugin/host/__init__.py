"""The operating system of one host: processes, files, addresses, output. No torch, and no decision about the job."""
