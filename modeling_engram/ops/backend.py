"""Which implementation an operation runs: the eager reference, or a kernel where one exists."""

BACKENDS = ("eager", "triton")


def resolve_backend(op: str, backend: str | None) -> str:
    """The implementation of `op` to run.

    Args:
        op (`str`): the operation's name, for the error message.
        backend (`str`, *optional*): `"eager"`, `"triton"`, or None to choose.

    Raises:
        ValueError: unknown backend.
        NotImplementedError: `op` has no kernel for the backend that was asked for.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {BACKENDS} or None to choose, got {backend!r}.")
    if backend == "triton":
        raise NotImplementedError(f"`{op}` has no Triton kernel in this version: use backend=None or 'eager'.")
    return "eager"
