"""The model, written for one shard. Start reading at `decoder.py`."""
