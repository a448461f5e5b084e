"""Streams of a `Communicator`: operations that run one after another in the background.

The body of an operation is a generator. It starts collectives, yields their works and is resumed
once they have ended; its frame keeps temporary tensors alive. A stream runs its operations in the
order of the calls and starts none before the previous one has ended, so an operation may use the
results of earlier ones on its stream. For CPU tensors a thread runs the operations (only if needed:
the caller itself starts a single collective). For CUDA tensors a `torch.cuda.Stream` does, and the
host never waits. A lane is a process group with the streams that use it. A handle is a number that
identifies one or more operations.
"""
