"""Checkpoints: read, load, make, re-quantise, inspect, convert. Nothing is imported here."""
