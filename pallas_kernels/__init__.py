"""Kernels written in Pallas (Mosaic GPU) and raw Triton: one module an op stem.

A kernel takes arrays and integers and knows nothing of the model: an axis name, a tile size or an
operand already in the right layout comes as an argument. Triton is imported inside functions, or in
a file whose name ends in `_triton.py` and which is itself imported inside functions.
"""
