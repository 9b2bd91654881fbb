"""Kernels bound through XLA FFI: one module an op stem, which checks, shapes and calls.

A binding takes arrays and integers and knows nothing of the model. Device code in the CuTe DSL
lives in `cute/`, which a binding imports inside functions only, so that importing this package
needs neither a GPU nor the DSL. Kernels are compiled ahead of time and launched as prebuilt
objects.
"""
