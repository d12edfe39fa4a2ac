"""The one unknown scalar of a single sample's head gradient: read off the bias gradient, or found by the label's family on a grid.

The search has few numbers. It runs in numpy on the host, where calling an operation costs least.
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
GENTLE, SATURATED = 7.0, 60.0  # ranges of logits: below the first the softmax changes slowly, beyond the second it is one-hot
SMALLEST_ERROR = 1e-8  # |p_r − y_r| down to which the grid reaches
STARTS = 12  # local minima of the grid that Gauss-Newton polishes
MOST_STEPS = 8  # of Gauss-Newton
LAST_STEP = 1e-4  # a step this short, and below √precision, is the last: the next would be as short as its square
HOPELESS = 0.1  # residual from which on a start is not waited for while others lie below
CHUNK = 2**21  # label entries held at once
BIAS_TOLERANCE = 1e-2  # relative distance between ∇b and the rows of ∇W from which on the bias is not trusted
SMALLEST_DIVISOR = 1e-300


def solve(head: Head, temperature: float, family: Family, use_bias: bool) -> tuple[ScalarProblem, Candidates]:
    """The scalar of a single sample: read off the bias gradient where it is shared and may be used, else found by the label's family."""
    assert head.weight_gradient is not None
    gradient = on_host(head.weight_gradient)
    if use_bias and head.bias_gradient is not None:
        read = _read_from_bias(head, gradient, on_host(head.bias_gradient).astype(np.float64), temperature, family)
        if read is not None:
            return read
    problem = scalar_problem(head, gradient, temperature, family, int(lengths(gradient).argmax()))
    return problem, grid_search(problem)


def _read_from_bias(head: Head, gradient: Sent, seen: Array, temperature: float, family: Family) -> tuple[ScalarProblem, Candidates] | None:
    """s from ∇b = (p − y)/τ, which does not depend on the feature; None where the rows of ∇W are not proportional to ∇b.

    A pruned or noisy bias gradient disagrees with the rows. Then the rows alone must determine s.
    """
    size = float(seen @ seen)
    if size == 0:
        return None
    feature = seen @ gradient / size  # (H,)
    errors = gradient @ feature / max(float(feature @ feature), SMALLEST_DIVISOR)  # (C,) (p − y)/τ estimated from all rows
    mismatch = length(seen - errors) / size**0.5
    if not mismatch < BIAS_TOLERANCE:
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
    return problem, _bias_candidate(problem, error, mismatch + problem.noise + problem.precision)


def _bias_candidate(problem: ScalarProblem, error: float, spread: float) -> Candidates:
    """The one candidate that the bias gives, and its distance from the family."""
    errors, spreads, scale = np.array([error]), np.array([spread]), abs(problem.temperature * error)
    labels, blurs = _labels_and_blurs(problem, errors, spreads)
    misfit = lengths(_distance_from_family(labels.copy(), _largest_entries(labels, problem.free), problem))
    largest_logits = _largest_logits(problem, errors)
    floors = blurs + problem.precision * (2 + 4 * largest_logits)  # of the label itself
    return Candidates(
        errors=errors,
        labels=labels,
        residuals=misfit / scale,
        floors=floors / scale,
        spreads=spreads,
        blurs=blurs,
        error_bars=blurs + _rounding_errors(problem, errors, labels, largest_logits),
        read=True,
    )


def _labels_and_blurs(problem: ScalarProblem, errors: Array, spreads: Array) -> tuple[Array, Array]:
    """Labels (n, C), and their L1 change (n,) where s changes by its spread."""
    labels, shifted = np.split(problem.labels(np.concatenate([errors, errors * np.exp(np.minimum(spreads, 0.5))])), 2)
    return labels, np.abs(shifted - labels).sum(1)


def _rounding_errors(problem: ScalarProblem, errors: Array, labels: Array, largest_logits: Array) -> Array:
    """The L1 error of the labels (n, C) at each s that the client's own rounding may cause: (n,).

    Four terms are rounded. An error in a logit changes p by p (1 − p) times as much, in both its uses. The error of log p
    is relative, with p |log p| ≤ p (1 − p) (2 max|z|/τ + log C + 1). The errors of p and of p − y are relative to themselves.
    In half precision the sum exceeds what a certificate allows.
    """
    scale = problem.temperature * errors
    probabilities = labels + scale[:, None] * problem.ratios
    unsure = 1 - np.einsum("ij,ij->i", probabilities, probabilities)  # Σ p (1 − p)
    spread = 4 * largest_logits / problem.temperature + np.log(labels.shape[1]) + 1
    return problem.precision * (1 + np.maximum(unsure, 0) * spread + np.abs(scale) * np.abs(problem.ratios).sum())


def _largest_logits(problem: ScalarProblem, errors: Array) -> Array:
    return np.abs(problem.pull / errors[:, None] + problem.bias).max(1)


def grid_search(problem: ScalarProblem) -> Candidates:
    """All guesses of a grid at once, then Gauss-Newton from the grid's local minima.

    The residual is relative: the label's distance from the family, over s τ. The paper's plain variance also vanishes as s → 0,
    where the softmax saturates and any label fits.
    """
    size = _sizes(problem)
    errors = np.stack([sign * size for sign in ((problem.sign,) if problem.sign else (1, -1))])  # (signs, 3 POINTS)
    parts = np.array_split(errors.ravel(), -(-errors.size * len(problem.pull) // CHUNK))
    values = np.concatenate([_squared_distance(problem, part) for part in parts]).reshape(errors.shape)
    lowest = _is_local_minimum(values)
    starts = np.concatenate([errors[lowest][values[lowest].argsort()[:STARTS]], _guesses_within_noise(problem, errors, values)])
    found, residuals, slopes = _polish(problem, starts)
    labels = problem.labels(found)
    plausible = (labels.min(1) > -1e-3) & (labels.max(1) < 1 + 1e-3)
    order = np.where(plausible, residuals, residuals + residuals.max() + 1).argsort()
    order = order[: max(1, int(plausible.sum()))]
    floors = _noise_floors(problem, found[order], labels[order])
    spreads = floors / np.maximum(slopes[order], SMALLEST_DIVISOR)
    labels, blurs = _labels_and_blurs(problem, found[order], spreads)
    return Candidates(
        errors=found[order],
        labels=labels,
        residuals=residuals[order],
        floors=floors,
        spreads=spreads,
        blurs=blurs,
        error_bars=blurs + _rounding_errors(problem, found[order], labels, _largest_logits(problem, found[order])),
    )


def _sizes(problem: ScalarProblem) -> Array:
    """|s| from its largest, 1/τ, down to `SMALLEST_ERROR`: (3 POINTS,).

    Logits grow as 1/s, and the softmax changes when a logit changes by about one. So the steps are even in 1/s where the range of
    logits lies between `GENTLE` and `SATURATED`, and even in log s elsewhere.
    """
    spread = max(float(problem.pull.max() - problem.pull.min()), SMALLEST_DIVISOR)
    gentle, saturated = (min(max(limit / spread, 1.0), 1 / SMALLEST_ERROR) for limit in (GENTLE, SATURATED))
    even = np.arange(POINTS) / (POINTS - 1)
    inverse = [gentle**even, gentle + (saturated - gentle) * even, saturated * (1 / SMALLEST_ERROR / saturated) ** even]
    return 1 / (problem.temperature * np.concatenate(inverse))


def _guesses_within_noise(problem: ScalarProblem, errors: Array, values: Array) -> Array:
    """A few of the grid's guesses that fit within the noise without polishing, so that a whole range of fitting scalars is noticed."""
    guesses = errors[values <= max(1e-6, (4 * problem.precision) ** 2) * float(problem.ratios @ problem.ratios)]
    if len(guesses) < 3:  # no range: only the neighbours of a sharp minimum
        return guesses[:0]
    distances = lengths(_residual(problem, guesses)[0])
    guesses = guesses[distances <= _noise_floors(problem, guesses, problem.labels(guesses))]
    return guesses[:: max(1, len(guesses) // STARTS)]


def _is_local_minimum(values: Array) -> npt.NDArray[np.bool_]:
    """Not above either neighbour, and below one of them by more than rounding: of a plateau only the edges count."""
    padded = np.pad(values, ((0, 0), (1, 1)), constant_values=np.inf)
    left, right = padded[:, :-2], padded[:, 2:]
    return (values <= left) & (values <= right) & (values < (1 - 1e-6) * np.maximum(left, right))


def _squared_distance(problem: ScalarProblem, errors: Array) -> Array:
    """‖R‖² at each guess of s, for the grid: (n,) -> (n,)."""
    shape = _scaled_labels(problem, problem.probabilities(errors), (problem.temperature * errors)[:, None])
    _set_to_zero(shape, _largest_entries(shape, problem.free))
    squares = np.einsum("ij,ij->i", shape, shape)
    return squares - shape.sum(1) ** 2 / (shape.shape[1] - 1) if problem.family == "smoothing" else squares


def _largest_entries(shape: Array, count: int) -> npt.NDArray[np.intp]:
    """Indices of each row's largest entries: (n, count)."""
    first = shape.argmax(1)[:, None]
    if count == 1:
        return first
    others = shape.copy()
    np.put_along_axis(others, first, -np.inf, 1)
    return np.concatenate([first, others.argmax(1)[:, None]], 1)


def _set_to_zero(entries: Array, where: npt.NDArray[np.intp]) -> None:
    entries[np.arange(len(entries))[:, None], where] = 0


def _scaled_labels(problem: ScalarProblem, probabilities: Array, scale: Array) -> Array:
    """ŷ/(|s| τ), written over the probabilities: (n, C)."""
    probabilities /= np.abs(scale)
    probabilities -= np.sign(scale) * problem.ratios
    return probabilities


def _residual(problem: ScalarProblem, errors: Array) -> tuple[Array, Array]:
    """R = ŷ/(|s| τ) without the entries that the family leaves free, and dR/d log|s|: (n, C) each.

    Smoothing leaves the largest entry free, and the rest must be equal. One-hot leaves one free, and the rest must be zero. Mixup
    leaves two free, and the rest must be zero.
    """
    scale = (problem.temperature * errors)[:, None]
    probabilities = problem.probabilities(errors)
    growth = problem.pull / scale
    mean = np.einsum("ij,ij->i", probabilities, growth)[:, None]
    change = (mean - 1 - growth) * probabilities / np.abs(scale)
    shape = _scaled_labels(problem, probabilities, scale)
    free = _largest_entries(shape, problem.free)
    return _distance_from_family(shape, free, problem), _distance_from_family(change, free, problem)


def _distance_from_family(entries: Array, free: npt.NDArray[np.intp], problem: ScalarProblem) -> Array:
    """The entries' distance from the family, written over them; 0 where the family leaves an entry free: (n, C)."""
    _set_to_zero(entries, free)
    if problem.family == "smoothing":
        entries -= entries.sum(1, keepdims=True) / (entries.shape[1] - problem.free)
        _set_to_zero(entries, free)
    return entries


def _polish(problem: ScalarProblem, errors: Array) -> tuple[Array, Array, Array]:
    """Gauss-Newton in log|s| from every start at once: s, residuals and slopes ‖dR/d log|s|‖, (n,) each.

    It ends when no start moves. Starts with a large residual are not waited for where another's is small.
    """
    best, lowest, best_slope = errors, np.full_like(errors, np.inf), np.zeros_like(errors)
    settled, short = False, min(LAST_STEP, problem.precision**0.5)
    for _ in range(MOST_STEPS):
        residual, change = _residual(problem, errors)
        value, steepness = lengths(residual), lengths(change)
        better = value < lowest
        best, lowest, best_slope = (np.where(better, *pair) for pair in ((errors, best), (value, lowest), (steepness, best_slope)))
        if settled:
            break
        move = np.clip(-np.einsum("ij,ij->i", residual, change) / np.maximum(steepness**2, SMALLEST_DIVISOR), -0.05, 0.05)
        settled = bool((np.abs(move) < short)[value <= max(HOPELESS, 2 * value.min())].all())
        errors = errors * np.exp(move)
        errors = np.sign(errors) * np.clip(np.abs(errors), 0.1 * SMALLEST_ERROR / problem.temperature, 1 / problem.temperature)
    return best, lowest, best_slope


def _noise_floors(problem: ScalarProblem, errors: Array, labels: Array) -> Array:
    """‖R‖ at the true s: from the client's rounding of logits, p and y, entry by entry, and from what is not of rank one: (n,)."""
    sizes = problem.probabilities(errors) * (2 + 4 * _largest_logits(problem, errors))[:, None] + np.abs(labels)
    _set_to_zero(sizes, _largest_entries(labels, problem.free))
    others = problem.ratios.copy()
    others[np.abs(others).argmax()] = 0
    return problem.precision * lengths(sizes) / np.abs(problem.temperature * errors) + problem.noise * length(others)
