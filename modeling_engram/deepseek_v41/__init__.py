"""The DeepSeek-V4.1 text model: attention over a window and shared compressed entries, and experts."""
