"""Megatron-core: DistributedDataParallel, MegatronOptimizer, OptimizerParamScheduler and the pipeline schedules."""
