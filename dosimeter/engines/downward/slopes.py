"""The slopes of the loss at the outputs of layers whose inputs are not known yet, through maps that are.

A backward pass needs the values at the model's rectifiers, and nothing else: a convolution, a batch norm in eval mode and a sum have the
same derivative everywhere. So unknown outputs of layers stand as random numbers, known maps replace what a rectifier would make of
them, and two draws of the random numbers tell which slopes depend on unknown values. Slopes are pulled back from gate to gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.downward.norms import keeps_statistics, multiplied
from dosimeter.network.tape import Tape

MOST_UNCERTAIN = 16  # entries behind the first known map that are tried both ways
NEAR_ZERO = 1e-5  # of a rectifier's inputs, in units of their root mean square
AGREEMENT = 1e-9  # of the slopes of two draws, relative


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a rectifier gave, and where it lets slopes through."""

    maps: Tensor  # (B, ...)
    opened: Tensor  # (B, ...) bool
    known: Tensor  # (B, ...) bool
    doubtful: Tensor  # (B, ...) bool: entries that may be open or closed
    suspect: Tensor  # (B, ...) bool: those among them whose value is neither noise nor clear

    def filled(self, drawn: Tensor) -> Tensor:
        """The maps, with other numbers where they are not known."""
        return torch.where(self.known, self.maps, drawn)

    def passing(self, rng: Generator) -> Tensor:
        """1 where slopes pass, 0 where not, and either where it is not known."""
        guess = (torch.rand(self.opened.shape, generator=rng) > 1 / 2).to(self.opened.device)
        return torch.where(self.known, self.opened, guess).to(self.maps).contiguous()

    def flipped(self, entry: int) -> Gate:
        opened = self.opened.clone(memory_format=torch.contiguous_format)
        opened.view(-1)[entry] ^= True
        return replace(self, opened=opened)


class Backward:
    """Everything behind the maps that are known: slopes at some values, and the gates between them and the rest."""

    def __init__(self, tape: Tape, tensors: Mapping[str, Tensor]) -> None:
        self.tape, self.tensors = tape, tensors  # tensors in double precision
        self.gates: dict[int, Gate] = {}
        self.anchors: dict[int, Tensor] = {}  # slopes that are known at other values, such as the head's output
        self.uncertain: list[tuple[int, int]] = []  # gates and entries that the client's rounding may have opened or closed
        self._behind: dict[int, Tensor | None] = {}  # slopes at what a gate gives

    def put(self, value: int, gate: Gate) -> None:
        """Set a gate. What was computed through it is forgotten."""
        if value in self.gates:
            self._behind = {one: slopes for one, slopes in self._behind.items() if one > value}
        self.gates[value] = gate

    def put_all_behind(self, start: int, wanted: int) -> None:
        """Set the gates of all rectifiers between a known map and a value that follows from it.

        A rectifier whose input is zero up to the rounding of single precision may have been open or closed at the client.
        """
        between = [one for one in self.tape.ancestors([wanted], [start]) if one > start and self.tape.is_rectifier(one)]
        received = self.tape.run({start: self.gates[start].maps}, self.tensors, [self.tape.operation(one).sources[0] for one in between])
        near: list[tuple[float, int, int]] = []
        for value, before in zip(between, received):
            known = torch.ones_like(before, dtype=torch.bool)
            self.put(value, Gate(maps=before.clamp_min(0), opened=before > 0, known=known, doubtful=~known, suspect=~known))
            sizes = before.flatten().abs() / before.square().mean().sqrt()
            smallest = sizes.topk(min(MOST_UNCERTAIN, len(sizes)), largest=False)
            near += [(size, value, entry) for size, entry in zip(smallest.values.tolist(), smallest.indices.tolist()) if size < NEAR_ZERO]
        self.uncertain = [(value, entry) for _, value, entry in sorted(near)[:MOST_UNCERTAIN]]

    def flip(self, value: int, entry: int) -> None:
        self.put(value, self.gates[value].flipped(entry))

    def slopes(self, value: int, at: Tensor | None = None, *, frozen: bool = False) -> Tensor | None:
        """The slopes at a layer's output or at what a gate gives; None where they depend on maps that are not known.

        `at` is an estimate of the value itself: the derivative of a norm with statistics of its own depends on what it receives. `frozen`
        leaves out what a change of one entry does to the others through the statistics.
        """
        exact = value in self.gates and bool(self.gates[value].known.all())
        if not exact and any(self.tape.is_rectifier(one) and one not in self.gates for one in self._closure(value)):
            return None  # what a rectifier lets through depends on what it receives
        first, second = self._draw(value, 1, at, frozen), self._draw(value, 2, at, frozen)
        if first is None or second is None or not bool(torch.isfinite(first).all()):
            return None
        scale = first.abs().max()
        return first if scale > 0 and (first - second).abs().max() <= AGREEMENT * scale else None

    def lift(self, value: int, slopes: Tensor) -> tuple[int, Tensor] | None:
        """Slopes at a layer's output, carried up to what the next rectifier receives; None where more than a factor lies between."""
        top, chain = value, []
        while not self.tape.is_rectifier(top):
            after = self.tape.consumers(top)
            if len(after) != 1 or after[0] in self.anchors:
                return None
            top = after[0]
            chain.append(top)
        chain.pop()
        if not chain:
            return None
        first, second = (self._factors(value, chain, seed) for seed in (1, 2))
        if first is None or second is None or not torch.allclose(first, second, rtol=AGREEMENT) or not bool(first.all()):
            return None
        return chain[-1], slopes / first

    def _factors(self, value: int, chain: list[int], seed: int) -> Tensor | None:
        """What a slope at the end of the chain is multiplied by at its beginning, entry by entry."""
        rng, device = Generator().manual_seed(seed), next(iter(self.tensors.values())).device

        def draw(one: int) -> Tensor:
            return torch.rand(self.tape.shape(one), generator=rng, dtype=torch.float64).to(device)

        if self.tape.shape(chain[-1]) != self.tape.shape(value):
            return None
        values = {value: draw(value).requires_grad_()}
        with torch.enable_grad():
            for number in chain:
                operation = self.tape.operation(number)
                values |= {source: draw(source) for source in operation.sources if source not in values}
                values[number] = operation(values, self.tensors)
            weights = 1 + draw(value)
            return torch.autograd.grad((values[chain[-1]] * weights).sum(), values[value])[0] / weights

    def gate_behind(self, value: int) -> int | None:
        """The first gate that a layer's output goes through."""
        behind = [one for one in self._closure(value) if one in self.gates]
        return behind[0] if behind else None

    def _closure(self, value: int) -> list[int]:
        """What is computed from a value, in order, up to the next gates and anchors."""
        reached, found = {value}, []
        for number in range(value + 1, self.tape.output + 1):
            if reached.intersection(self.tape.operation(number).sources):
                found.append(number)
                if number not in self.gates and number not in self.anchors:
                    reached.add(number)
        return found

    def _draw(self, value: int, seed: int, at: Tensor | None, frozen: bool) -> Tensor | None:
        """The slopes at one value, with random numbers in the place of all that is not known."""
        rng, values = Generator().manual_seed(seed), {}

        def draw(one: int) -> Tensor:
            drawn = torch.rand(self.tape.shape(one), generator=rng, dtype=torch.float64).to(like)
            return self.gates[one].filled(drawn) if one in self.gates else drawn

        closure, like = self._closure(value), next(iter(self.anchors.values()))
        ends: list[Tensor] = []
        with torch.enable_grad():
            values[value] = (draw(value) if at is None else at.detach().clone()).requires_grad_()
            for number in closure:
                operation = self.tape.operation(number)
                if number in self.gates:
                    behind = self._slopes_of_gate(number)
                    if behind is None:
                        return None
                    weights = (behind * self.gates[number].passing(rng)).contiguous()  # batch norm's derivative mistakes other orders
                    ends.append((values[operation.sources[0]] * weights).sum())
                    continue
                for source in operation.sources:
                    if source not in values:
                        values[source] = draw(source)
                kept = multiplied(operation, values[operation.sources[0]], self.tensors) if frozen and keeps_statistics(operation) else None
                values[number] = operation(values, self.tensors) if kept is None else kept
                if number in self.anchors:
                    ends.append((values[number] * self.anchors[number]).sum())
                elif number == self.tape.output:
                    return None
            return torch.autograd.grad(torch.stack(ends).sum(), values[value])[0] if ends else None

    def _slopes_of_gate(self, value: int) -> Tensor | None:
        if value not in self._behind:
            self._behind[value] = self.slopes(value)
        return self._behind[value]
