"""Which outcome an error stands for, and what is quoted of it."""

import pytest
import torch

from dosimeter.engines.matching.errors import first_line, is_out_of_memory, outcome_of_error
from dosimeter.types import Outcome


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (MemoryError("no room"), Outcome.CRASHED, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), Outcome.CRASHED, "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), Outcome.CRASHED, "out of memory"),
        (OverflowError("too long a step"), Outcome.DIVERGED, "a smaller learning rate"),
        (RuntimeError("derivative and overflow and memory"), Outcome.CRASHED, "stopped by an error of the model"),
    ],
)
def test_an_error_ends_in_its_outcome_and_is_quoted(error, outcome, message):
    found, sentence = outcome_of_error(error)
    assert found is outcome
    assert message in sentence
    assert str(error) in sentence


def test_an_allocation_that_torch_refuses_on_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as raised:  # PyTorch has no type of its own for it
        torch.empty(10**15)
    outcome, sentence = outcome_of_error(raised.value)
    assert outcome is Outcome.CRASHED
    assert sentence.startswith("out of memory; fewer restarts")
    assert "allocate" in sentence


@pytest.mark.parametrize("error", [RuntimeError("out of memory of the past"), ValueError("CUDA error: out of memory"), OverflowError()])
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_first_line_is_short_and_never_empty():
    assert first_line(RuntimeError("  one\ntwo")) == "one"
    assert first_line(RuntimeError("x" * 999)) == "x" * 200
    assert first_line(ZeroDivisionError()) == "ZeroDivisionError"
