"""Megatron-core: DistributedDataParallel, MegatronOptimizer, OptimizerParamScheduler and the pipeline schedules."""

from .adapter import MegatronAdapter

__all__ = ["MegatronAdapter"]
