"""Mesh, logical axes and collectives. A leaf: knows nothing of the model."""
