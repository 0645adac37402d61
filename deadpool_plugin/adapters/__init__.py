"""Framework glue: what each training framework's calls, state and random generators are."""
