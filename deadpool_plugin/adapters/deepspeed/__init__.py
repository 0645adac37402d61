"""DeepSpeed: engines in a script's own loop, with ZeRO 0 to 3."""
