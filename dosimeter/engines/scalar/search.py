"""The one unknown scalar of a single sample's head gradient: off the bias, or by the label's form on a grid.

All of it is a search among a few numbers: it runs in numpy, on the host, where calling an operation costs least.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dosimeter.engines.scalar.problem import (
    Array,
    Candidates,
    Family,
    ScalarProblem,
    Sent,
    bias_of,
    length,
    lengths,
    off_rank_one,
    on_host,
    precision_of,
    scalar_problem,
)
from dosimeter.network.head import Head

POINTS = 192  # of each of the grid's three parts, for each sign
GENTLE, SATURATED = 7.0, 60.0  # ranges of logits from which on the softmax turns within a step, and beyond which it is one-hot
SMALLEST_ERROR = 1e-8  # error of the row r that the grid reaches down to
POLISHED = 12  # local minima of the grid that Newton polishes
POLISHINGS = 8  # at most
SETTLED = 1e-4  # a step of Gauss-Newton this short, and below √precision, is the last: the next would be its square
HOPELESS = 0.1  # a residual beyond which a start is not waited for while others are below it
CHUNK = 2**21  # label entries held at once
BELIEVED = 1e-2  # relative distance between the bias's gradient and the rows' beyond which the bias is not believed
TINY = 1e-300


def solve(head: Head, temperature: float, family: Family, use_bias: bool) -> tuple[ScalarProblem, Candidates]:
    """The scalar of a single sample: off the bias where it is shared and may be used, else by the label's family."""
    assert head.weight_gradient is not None
    gradient = on_host(head.weight_gradient)
    if use_bias and head.bias_gradient is not None:
        read = _read_from_bias(head, gradient, on_host(head.bias_gradient).astype(np.float64), temperature, family)
        if read is not None:
            return read
    problem = scalar_problem(head, gradient, temperature, family, int(lengths(gradient).argmax()))
    return problem, grid_search(problem)


def _read_from_bias(head: Head, gradient: Sent, seen: Array, temperature: float, family: Family) -> tuple[ScalarProblem, Candidates] | None:
    """s from ∇b = (p − y)/τ, in which the feature has no part; nothing where the rows of ∇W do not go as the entries of ∇b.

    A pruned or noisy bias gradient does not agree with the rows, which then have to tell s by themselves.
    """
    size = float(seen @ seen)
    if size == 0:
        return None
    feature = seen @ gradient / size  # (H,)
    errors = gradient @ feature / max(float(feature @ feature), TINY)  # (C,) (p − y)/τ as all rows have it
    mismatch = length(seen - errors) / size**0.5
    if not mismatch < BELIEVED:
        return None
    error, precision = float(seen[np.abs(seen).argmax()]), precision_of(head)
    problem = ScalarProblem(
        row=error * feature,
        ratios=errors / error,
        pull=error * (on_host(head.weight) @ feature),
        bias=bias_of(head),
        temperature=temperature,
        family=family,
        precision=precision,
        noise=off_rank_one(gradient, errors, feature, precision),
        sign=0,
    )
    return problem, _read(problem, error, mismatch + problem.noise + problem.precision)


def _read(problem: ScalarProblem, error: float, spread: float) -> Candidates:
    """The one candidate that the bias leaves, and how far it is from the family."""
    errors, spreads, scale = np.array([error]), np.array([spread]), abs(problem.temperature * error)
    labels, blurs = _blurred(problem, errors, spreads)
    misfit = lengths(_off_family(labels.copy(), _largest(labels, problem.free), problem))
    largest_logits = _largest_logits(problem, errors)
    floors = blurs + problem.precision * (2 + 4 * largest_logits)  # of the label itself
    return Candidates(
        errors=errors,
        labels=labels,
        residuals=misfit / scale,
        floors=floors / scale,
        spreads=spreads,
        blurs=blurs,
        error_bars=blurs + _rounded(problem, errors, labels, largest_logits),
        read=True,
    )


def _blurred(problem: ScalarProblem, errors: Array, spreads: Array) -> tuple[Array, Array]:
    """Labels (n, C), and how far they move (n,), L1, where s moves by its spread."""
    labels, shifted = np.split(problem.labels(np.concatenate([errors, errors * np.exp(np.minimum(spreads, 0.5))])), 2)
    return labels, np.abs(shifted - labels).sum(1)


def _rounded(problem: ScalarProblem, errors: Array, labels: Array, largest_logits: Array) -> Array:
    """How far the client's own rounding may move the labels (n, C) at each s: (n,), L1.

    A logit is off by units of its size and moves p by p (1 − p) of that, on both sides; log p is off by units of its own size, where
    p |log p| ≤ p (1 − p) (2 max|z|/τ + log C + 1); and p, which sums to 1, and p − y by units of themselves. In half precision this
    alone is more than a certificate allows.
    """
    scale = problem.temperature * errors
    probabilities = labels + scale[:, None] * problem.ratios
    unsure = 1 - np.einsum("ij,ij->i", probabilities, probabilities)  # Σ p (1 − p)
    spread = 4 * largest_logits / problem.temperature + np.log(labels.shape[1]) + 1
    return problem.precision * (1 + np.maximum(unsure, 0) * spread + np.abs(scale) * np.abs(problem.ratios).sum())


def _largest_logits(problem: ScalarProblem, errors: Array) -> Array:
    return np.abs(problem.pull / errors[:, None] + problem.bias).max(1)


def grid_search(problem: ScalarProblem) -> Candidates:
    """Every guess of a grid at once, then Gauss-Newton from the grid's local minima.

    The residual is relative, (ŷ off the family) / (s τ): the plain variance also vanishes as s → 0, where the softmax
    saturates and any label can be explained.
    """
    size = _sizes(problem)
    errors = np.stack([sign * size for sign in ((problem.sign,) if problem.sign else (1, -1))])  # (signs, 3 POINTS)
    parts = np.array_split(errors.ravel(), -(-errors.size * len(problem.pull) // CHUNK))
    values = np.concatenate([_distance(problem, part) for part in parts]).reshape(errors.shape)
    lowest = _is_local_minimum(values)
    starts = np.concatenate([errors[lowest][values[lowest].argsort()[:POLISHED]], _fitting(problem, errors, values)])
    found, residuals, slopes = _polished(problem, starts)
    labels = problem.labels(found)
    plausible = (labels.min(1) > -1e-3) & (labels.max(1) < 1 + 1e-3)
    order = np.where(plausible, residuals, residuals + residuals.max() + 1).argsort()
    order = order[: max(1, int(plausible.sum()))]
    floors = _noise_floors(problem, found[order], labels[order])
    spreads = floors / np.maximum(slopes[order], TINY)
    labels, blurs = _blurred(problem, found[order], spreads)
    return Candidates(
        errors=found[order],
        labels=labels,
        residuals=residuals[order],
        floors=floors,
        spreads=spreads,
        blurs=blurs,
        error_bars=blurs + _rounded(problem, found[order], labels, _largest_logits(problem, found[order])),
    )


def _sizes(problem: ScalarProblem) -> Array:
    """|s| from its largest, 1/τ, down to `SMALLEST_ERROR`: (3 POINTS,).

    Logits grow as 1/s and the softmax turns when they change by about one: where their range is between `GENTLE` and
    `SATURATED` the steps are even in 1/s, elsewhere even in log s.
    """
    spread = max(float(problem.pull.max() - problem.pull.min()), TINY)
    gentle, saturated = (min(max(limit / spread, 1.0), 1 / SMALLEST_ERROR) for limit in (GENTLE, SATURATED))
    even = np.arange(POINTS) / (POINTS - 1)
    inverse = [gentle**even, gentle + (saturated - gentle) * even, saturated * (1 / SMALLEST_ERROR / saturated) ** even]
    return 1 / (problem.temperature * np.concatenate(inverse))


def _fitting(problem: ScalarProblem, errors: Array, values: Array) -> Array:
    """A few of the grid's guesses that fit within the noise as they are: where there is a range of them, it shows."""
    guesses = errors[values <= max(1e-6, (4 * problem.precision) ** 2) * float(problem.ratios @ problem.ratios)]
    if len(guesses) < 3:  # no range, but the neighbours of a sharp minimum
        return guesses[:0]
    distances = lengths(_residual(problem, guesses)[0])
    guesses = guesses[distances <= _noise_floors(problem, guesses, problem.labels(guesses))]
    return guesses[:: max(1, len(guesses) // POLISHED)]


def _is_local_minimum(values: Array) -> npt.NDArray[np.bool_]:
    """Lower than both neighbours, and by more than rounding than one of them: a plateau counts at its edge alone."""
    padded = np.pad(values, ((0, 0), (1, 1)), constant_values=np.inf)
    left, right = padded[:, :-2], padded[:, 2:]
    return (values <= left) & (values <= right) & (values < (1 - 1e-6) * np.maximum(left, right))


def _distance(problem: ScalarProblem, errors: Array) -> Array:
    """‖R‖² at each guess of s, for the grid: (n,) -> (n,)."""
    shape = _shape(problem, problem.probabilities(errors), (problem.temperature * errors)[:, None])
    _zero(shape, _largest(shape, problem.free))
    squares = np.einsum("ij,ij->i", shape, shape)
    return squares - shape.sum(1) ** 2 / (shape.shape[1] - 1) if problem.family == "smoothing" else squares


def _largest(shape: Array, count: int) -> npt.NDArray[np.intp]:
    """Indices of each row's largest entries: (n, count)."""
    first = shape.argmax(1)[:, None]
    if count == 1:
        return first
    others = shape.copy()
    np.put_along_axis(others, first, -np.inf, 1)
    return np.concatenate([first, others.argmax(1)[:, None]], 1)


def _zero(entries: Array, where: npt.NDArray[np.intp]) -> None:
    entries[np.arange(len(entries))[:, None], where] = 0


def _shape(problem: ScalarProblem, probabilities: Array, scale: Array) -> Array:
    """ŷ/(|s| τ), in the place of the probabilities: (n, C)."""
    probabilities /= np.abs(scale)
    probabilities -= np.sign(scale) * problem.ratios
    return probabilities


def _residual(problem: ScalarProblem, errors: Array) -> tuple[Array, Array]:
    """R = ŷ/(|s| τ) without the entries that the family leaves free, and dR/d log|s|: (n, C) each.

    Smoothing leaves the largest entry free and wants the rest equal; one-hot wants the rest zero; mixup leaves two free
    and wants the rest zero.
    """
    scale = (problem.temperature * errors)[:, None]
    probabilities = problem.probabilities(errors)
    growth = problem.pull / scale
    mean = np.einsum("ij,ij->i", probabilities, growth)[:, None]
    change = (mean - 1 - growth) * probabilities / np.abs(scale)
    shape = _shape(problem, probabilities, scale)
    free = _largest(shape, problem.free)
    return _off_family(shape, free, problem), _off_family(change, free, problem)


def _off_family(entries: Array, free: npt.NDArray[np.intp], problem: ScalarProblem) -> Array:
    """The entries, in their place, without what the family leaves free: (n, C)."""
    _zero(entries, free)
    if problem.family == "smoothing":
        entries -= entries.sum(1, keepdims=True) / (entries.shape[1] - problem.free)
        _zero(entries, free)
    return entries


def _polished(problem: ScalarProblem, errors: Array) -> tuple[Array, Array, Array]:
    """Gauss-Newton in log|s| from every start at once, until none moves: (n,) s, residuals and slopes ‖dR/d log|s|‖.

    Where one start is near a zero, those that are far from any are not waited for.
    """
    best, lowest, best_slope = errors, np.full_like(errors, np.inf), np.zeros_like(errors)
    settled, short = False, min(SETTLED, problem.precision**0.5)
    for _ in range(POLISHINGS):
        residual, change = _residual(problem, errors)
        value, steepness = lengths(residual), lengths(change)
        better = value < lowest
        best, lowest, best_slope = (np.where(better, *pair) for pair in ((errors, best), (value, lowest), (steepness, best_slope)))
        if settled:
            break
        move = np.clip(-np.einsum("ij,ij->i", residual, change) / np.maximum(steepness**2, TINY), -0.05, 0.05)
        settled = bool((np.abs(move) < short)[value <= max(HOPELESS, 2 * value.min())].all())
        errors = errors * np.exp(move)
        errors = np.sign(errors) * np.clip(np.abs(errors), 0.1 * SMALLEST_ERROR / problem.temperature, 1 / problem.temperature)
    return best, lowest, best_slope


def _noise_floors(problem: ScalarProblem, errors: Array, labels: Array) -> Array:
    """‖R‖ that a true s keeps: the client's rounding of logits, p and y, entry by entry, and what is not of rank one: (n,)."""
    sizes = problem.probabilities(errors) * (2 + 4 * _largest_logits(problem, errors))[:, None] + np.abs(labels)
    _zero(sizes, _largest(labels, problem.free))
    others = problem.ratios.copy()
    others[np.abs(others).argmax()] = 0
    return problem.precision * lengths(sizes) / np.abs(problem.temperature * errors) + problem.noise * length(others)
