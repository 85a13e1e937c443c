"""Parts of ``benchmarks/training/train.py``."""
