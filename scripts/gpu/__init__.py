"""What only an NVIDIA card can prove: the parts of gpu_evidence.sh."""
