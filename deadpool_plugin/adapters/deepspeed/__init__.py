"""DeepSpeed: engines in a script's own loop, with ZeRO 0 to 3."""

from .adapter import DeepSpeedAdapter

__all__ = ["DeepSpeedAdapter"]
