"""Proofs that need an NVIDIA card: the parts of gpu_evidence.sh."""
