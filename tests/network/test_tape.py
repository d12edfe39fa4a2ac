"""A tape runs a model's operations again, from its input or from any value."""

import torch
from torch import nn

from dosimeter.network.tape import record, tensors_of


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        maps = nn.functional.relu(self.first(inputs), inplace=True)
        more = self.second(maps)
        more += maps
        return self.head(torch.relu_(more).mean((2, 3)))


def test_a_replay_gives_what_the_model_gives_and_writes_into_nothing() -> None:
    torch.manual_seed(0)
    model, inputs = InPlace(), torch.rand(2, 1, 6, 6)
    tape, tensors = record(model, torch.zeros(2, 1, 6, 6)), tensors_of(model)
    values = tape.run({0: inputs}, tensors, list(range(tape.output + 1)))
    torch.testing.assert_close(values[tape.output], model(inputs), rtol=0, atol=0)
    torch.testing.assert_close(values[0], inputs, rtol=0, atol=0)
    rectified = next(value for value in range(1, tape.output + 1) if tape.is_rectifier(value))
    kept = values[rectified].clone()
    (again,) = tape.run({rectified: values[rectified]}, tensors, [tape.output])
    torch.testing.assert_close(again, values[tape.output], rtol=0, atol=0)
    torch.testing.assert_close(values[rectified], kept, rtol=0, atol=0)
    assert tape.follows_from(tape.output, [rectified])


def test_a_shortcut_past_a_value_is_seen() -> None:
    torch.manual_seed(0)
    tape = record(InPlace(), torch.zeros(2, 1, 6, 6))
    second = tape.layer("second.weight")
    assert second is not None
    assert not tape.follows_from(tape.output, [second])
    assert tape.layer("no.weight") is None
