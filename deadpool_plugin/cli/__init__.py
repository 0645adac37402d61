"""Commands for people who run a job. They never load torch."""
