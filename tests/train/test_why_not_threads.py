"""Why replicas are processes: PyTorch's tracing state belongs to the process, up to torch 2.13."""

import threading

import pytest
import torch

FIXED = (2, 14)


def test_a_compiled_function_fails_while_another_thread_traces():
    """The system that this one replaces trained in threads, met this on every fresh start and fell back to eager."""
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= FIXED:
        pytest.skip(
            "torch 2.14 keeps the tracing flag by thread; patching while tracing is still process-wide, so replicas "
            "stay processes"
        )
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.zeros(2))  # compiled, and called again: no first compilation is to blame
    tracing, go_on = threading.Event(), threading.Event()

    class Held(torch.nn.Module):
        def forward(self, x):
            tracing.set()
            assert go_on.wait(60)
            return x + 1

    other = threading.Thread(target=torch.fx.symbolic_trace, args=(Held(),))
    other.start()
    try:
        assert tracing.wait(60)
        with pytest.raises(RuntimeError, match="symbolically trace a dynamo-optimized function"):
            compiled(torch.zeros(2))
    finally:
        go_on.set()
        other.join()
    assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0]
    torch._dynamo.reset()
