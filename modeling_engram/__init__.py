"""The Engram model: layers, memory, residual stream and generation state."""
