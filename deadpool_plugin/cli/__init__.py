"""Commands for people who run a job. They read what the agents wrote and never load torch."""
