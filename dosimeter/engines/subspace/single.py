"""Single samples: a linear scan over all classes, then batched Levenberg–Marquardt on the relative residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.least_squares import Damping, Parts, Problem, minimise, minimise_by_chords
from dosimeter.engines.subspace.equations import (
    Equations,
    Span,
    blend_directions,
    probabilities,
    project_off,
    slopes,
    transposed_slopes,
    weighted_errors,
    whole_span,
)

LARGEST_TENSOR = {"cpu": 2**21, "cuda": 2**27}  # entries of one (starts, classes, rank) tensor
PAIRED_CLASSES = 2**12  # likeliest classes of which all pairs are scored where labels blend
MOST_PAIRS = 512  # class pairs that a scan returns where labels blend
CHORD_WORK = 2**25  # classes times squared dimensions from which a normal matrix is kept for several steps: it costs seconds in all
MOST_MATRICES = 6  # of one start then
CANCELLED = 1e-6  # share of a sum of squares below which rounding spoils a score that is a difference of such sums
LEAST_ERROR = 1e-150  # least divisor of the relative residual


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The point that one linear step reaches for each label."""

    labels: Tensor  # (m,)
    reached: Tensor  # (m, r) coordinates
    score: Tensor  # (m,) relative residual under a linearised softmax, small for labels that are present
    upper: Tensor  # (r, r) factor R of the projected slopes; its inverse is large in directions where a label is ambiguous


def linear_scan(equations: Equations, span: Span, start: Tensor) -> Scan:
    """One Gauss–Newton step from a common start for every class or target; for the likeliest class pairs where labels blend.

    Only the right-hand side depends on the label, so one factorisation serves all labels.
    """
    p = probabilities(equations, span, start[None])
    slope = slopes(equations, span, p)[0]
    slope = slope - span.left @ (span.left.T @ slope)  # (C, r)
    scale = torch.linalg.vector_norm(slope, dim=0).clamp_min(torch.finfo(slope.dtype).tiny)
    orthogonal, upper = torch.linalg.qr(slope / scale)
    linear = _LinearStep(equations=equations, span=span, p=p, orthogonal=orthogonal)
    along, score = linear.of_classes() if equations.targets is None else linear.of(torch.arange(len(equations.targets), device=p.device))
    labels = torch.arange(len(score), device=p.device)
    upper = upper + 1e-14 * torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    step = torch.linalg.solve_triangular(upper, along.T, upper=True).T / scale
    if equations.blends:
        likely = score.topk(min(len(score), PAIRED_CLASSES), largest=False).indices.sort().values
        errors, rest, _ = linear.residuals(likely)
        pairs, share, score = likeliest_pairs(rest, errors)
        first, second = likely[pairs // len(likely)], likely[pairs % len(likely)]
        labels = first * equations.classes + second
        step = step[first] + share[:, None] * (step[second] - step[first])
    return Scan(labels=labels, reached=start - step, score=score, upper=upper * scale)


@dataclass(frozen=True, kw_only=True)
class _LinearStep:
    """What one linear step leaves of the errors e of each label: P e, where P takes away the column space and the slopes."""

    equations: Equations
    span: Span
    p: Tensor  # (1, C) where the step begins
    orthogonal: Tensor  # (C, r) basis Q of the projected slopes

    def residuals(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted errors (k, C), what the linear step leaves of them (k, C), and its coordinates (k, r)."""
        errors = _errors_at(self.equations, self.p, labels)
        rows = project_off(self.span, errors)
        along = rows @ self.orthogonal
        return errors, rows - along @ self.orthogonal.T, along

    def of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The coordinates (k, r) and scores (k,) of labels, with the errors of a few at a time."""
        along, score = self.orthogonal.new_empty(len(labels), self.orthogonal.shape[1]), self.p.new_empty(len(labels))
        few = max(1, LARGEST_TENSOR.get(self.p.device.type, 2**21) // self.p.shape[1])
        for begin in range(0, len(labels), few):
            errors, rest, along[begin : begin + few] = self.residuals(labels[begin : begin + few])
            score[begin : begin + few] = torch.linalg.vector_norm(rest, dim=1) / torch.linalg.vector_norm(errors, dim=1)
        return along, score

    def of_classes(self) -> tuple[Tensor, Tensor]:
        """The same for every class, without the C² entries of their errors: (C, r) and (C,).

        The error of class c is e = a − s δ_c, where a = w∘p and s = w_c up to smoothing. Hence
        ‖P e‖² = ‖P a‖² − 2 s (P a)_c + s² P_cc and ‖e‖² = ‖a‖² − 2 s a_c + s². Where these sums cancel, the errors are built.
        """
        w, left, basis = self.equations.spectrum.weights, self.span.left, self.orthogonal
        a, s = w * (self.p[0] - self.equations.even), self.equations.share * w
        off = a - left @ (left.T @ a)
        along = basis.T @ off - s[:, None] * (basis - left @ (left.T @ basis))
        rest = off - basis @ (basis.T @ off)
        own = 1 - left.square().sum(1) - basis.square().sum(1)  # (C,) P_cc
        value = rest.square().sum() - 2 * s * rest + s.square() * own
        size, most = a.square().sum() - 2 * s * a + s.square(), a.square().sum() + s.square()
        score = (value.clamp_min(0) / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt()
        cancelled = (torch.minimum(value, size) < CANCELLED * most).nonzero()[:, 0]
        along[cancelled], score[cancelled] = self.of(cancelled)
        return along, score


def _errors_at(equations: Equations, p: Tensor, labels: Tensor) -> Tensor:
    """The weighted errors w∘(p − y) of a sample with probabilities p (1, C), for each label or target: (k, C)."""
    w = equations.spectrum.weights
    if equations.targets is not None:
        return w * (p - equations.even - equations.share * equations.targets[labels])
    errors = (w * (p - equations.even)).repeat(len(labels), 1)
    errors[torch.arange(len(labels), device=labels.device), labels] -= equations.share * w[labels]
    return errors


def likeliest_pairs(rest: Tensor, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of classes (m,), the share μ of the second (m,) and the score (m,), best first. `rest` and `errors` have one row a class.

    ‖(1 − μ) r_a + μ r_b‖² is a parabola in μ. Its coefficients are entries of the rows' Gram matrix, so all C² pairs cost one product. A
    pair needs 0 < μ < 1 at the minimum. A class alone is its pair with itself.
    """
    gram, sizes = rest @ rest.T, errors @ errors.T  # (C, C)
    own, size = gram.diagonal(), sizes.diagonal()
    bend = (own[:, None] + own - 2 * gram).clamp_min(torch.finfo(gram.dtype).tiny)
    share = (own[:, None] - gram) / bend
    value = own[:, None] - share * (own[:, None] - gram)
    whole_size = (1 - share).square() * size[:, None] + share.square() * size + 2 * share * (1 - share) * sizes
    score = (value.clamp_min(0) / whole_size.clamp_min(torch.finfo(gram.dtype).tiny)).sqrt()
    score = torch.where(((share > 0) & (share < 1)).triu(1), score, torch.inf)
    score.diagonal().copy_((own / size.clamp_min(torch.finfo(gram.dtype).tiny)).sqrt())
    share.diagonal().zero_()
    best = score.flatten().topk(min(MOST_PAIRS, score.numel()), largest=False)
    return best.indices, share.flatten()[best.indices], best.values


def solve(equations: Equations, span: Span, t: Tensor, labels: Tensor, *, iterations: int = 40) -> tuple[Tensor, Tensor]:
    """Minimise ‖(I − UUᵀ) w∘d‖² / ‖w∘d‖² from each start, for its label. Returns coordinates (n, r) and values (n,).

    The residual is relative because the plain one vanishes trivially where softmax(z) reaches the label (rgla's "twin data").
    """
    chunk = chunk_size(span, t)
    by_chords = span.logits.numel() * span.logits.shape[1] >= CHORD_WORK
    pieces = []
    for starts, names in zip(t.split(chunk), labels.split(chunk)):
        problem = _RelativeResidual(equations=equations, span=span, labels=names)
        if by_chords:
            pieces.append(minimise_by_chords(problem, starts, Damping(), iterations=iterations, matrices=MOST_MATRICES))
        else:
            pieces.append(minimise(problem, starts, Damping(), iterations=iterations))
    return torch.cat([piece.unknowns for piece in pieces]), torch.cat([piece.value for piece in pieces])


def polish(equations: Equations, span: Span, t: Tensor, labels: Tensor, *, steps: int = 2) -> tuple[Tensor, Tensor]:
    """Undamped Gauss–Newton steps at a solution. They gain digits where rounding hides any change of the residual.

    Returns the coordinates and, for each sample, the inverse Cholesky factor of slopesᵀ slopes there (n, r, r).
    """
    for _ in range(steps):
        t = newton_step(equations, span, t, labels)
    chunk = chunk_size(span, t)
    pieces = zip(t.split(chunk), labels.split(chunk))
    return t, torch.cat([_slopes_and_inverse(equations, span, probabilities(equations, span, a), b)[1] for a, b in pieces])


def newton_step(equations: Equations, span: Span, t: Tensor, labels: Tensor) -> Tensor:
    """One undamped Gauss–Newton step on the plain residual; no step where the slopes are singular."""
    chunk = chunk_size(span, t)
    return torch.cat([_newton_step(equations, span, a, b) for a, b in zip(t.split(chunk), labels.split(chunk))])


def sensitivities(equations: Equations, t: Tensor, labels: Tensor, inverse: Tensor) -> Tensor:
    """The squared length by which one unit in each equation moves a feature: columns of S A⁺, A the projected slopes: (n, C)."""
    span, chunk, values = whole_span(equations), chunk_size(whole_span(equations), t), equations.spectrum.values
    pieces = []
    for piece, names, factor in zip(t.split(chunk), labels.split(chunk), inverse.split(chunk)):
        slope = slopes(equations, span, probabilities(equations, span, piece), names)
        slope = slope - span.left @ (span.left.T @ slope)  # (n, C, B)
        pieces.append(((slope @ factor.transpose(1, 2)) @ factor * values).square().sum(2))
    return torch.cat(pieces) if pieces else t.new_empty(0, equations.classes)


def chunk_size(span: Span, t: Tensor) -> int:
    """The number of starts that fit into one (starts, classes, rank) tensor."""
    return max(1, LARGEST_TENSOR.get(t.device.type, 2**21) // max(span.logits.numel(), 1))


@dataclass(frozen=True, kw_only=True)
class _RelativeResidual(Problem):
    """ρ = (I − UUᵀ) w∘d / ‖w∘d‖ of one sample a row; the unknowns are its coordinates."""

    equations: Equations
    span: Span
    labels: Tensor  # (n,)

    def evaluate(self, unknowns: Tensor, rows: Tensor) -> tuple[Tensor, Parts]:
        p = probabilities(self.equations, self.span, unknowns)
        error = weighted_errors(self.equations, self.span, p, self.labels[rows])
        size = torch.linalg.vector_norm(error, dim=1, keepdim=True).clamp_min(LEAST_ERROR)
        residual = project_off(self.span, error) / size
        return residual.square().sum(1), (p, residual, error, size)

    def gradient(self, unknowns: Tensor, rows: Tensor, parts: Parts) -> Tensor:
        """Jᵀρ = (Mᵀρ − ‖ρ‖² Mᵀ w∘d/‖w∘d‖)/‖w∘d‖ without the slopes M; a blend that follows t only changes the rows that M meets."""
        p, residual, error, size = parts
        both = [residual, error / size]
        if self.equations.blends:
            across, along = blend_directions(self.equations, self.span, self.labels[rows])
            both = [row - along * (across * row).sum(1, keepdim=True) for row in both]
        of_residual, of_error = (transposed_slopes(self.equations, self.span, p, row) for row in both)
        return (of_residual - residual.square().sum(1, keepdim=True) * of_error) / size

    def normal_equations(self, unknowns: Tensor, rows: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        p, residual, error, size = parts
        return _normal_equations(self.equations, self.span, p, self.labels[rows], residual, error, size)


def _normal_equations(
    equations: Equations, span: Span, p: Tensor, labels: Tensor, residual: Tensor, error: Tensor, size: Tensor
) -> tuple[Tensor, Tensor]:
    """JᵀJ (n, r, r) and Jᵀρ (n, r) of the relative residual ρ = P w∘d / ‖w∘d‖, with J = P M/‖w∘d‖ − ρ cᵀ, c = Mᵀ w∘d/‖w∘d‖².

    M itself is never projected by P = I − UUᵀ: MᵀPM = MᵀM − (UᵀM)ᵀ(UᵀM), and ρ in Mᵀρ is projected already.
    """
    slope = slopes(equations, span, p, labels) / size[:, :, None]  # M / ‖w∘d‖: (n, C, r)
    inside = span.left.T @ slope  # (n, r, r)
    c = (error[:, None, :] @ slope)[:, 0] / size  # (n, r)
    gradient = (residual[:, None, :] @ slope)[:, 0]  # (n, r)
    value = residual.square().sum(1)[:, None]
    hessian = slope.transpose(1, 2) @ slope - inside.transpose(1, 2) @ inside
    cross = gradient[:, :, None] * c[:, None, :]
    hessian = hessian - cross - cross.transpose(1, 2) + value[:, :, None] * c[:, :, None] * c[:, None, :]
    return hessian, gradient - value * c


def _newton_step(equations: Equations, span: Span, t: Tensor, labels: Tensor) -> Tensor:
    p = probabilities(equations, span, t)
    slope, inverse = _slopes_and_inverse(equations, span, p, labels)
    residual = project_off(span, weighted_errors(equations, span, p, labels))
    step = (inverse.transpose(1, 2) @ (inverse @ (slope.transpose(1, 2) @ residual[:, :, None])))[:, :, 0]
    return t - torch.where(torch.isfinite(step).all(1, keepdim=True), step, torch.zeros_like(step))


def _slopes_and_inverse(equations: Equations, span: Span, p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The projected slopes A (n, C, r), and L⁻¹ with AᵀA = L Lᵀ (n, r, r), infinite where AᵀA is singular."""
    slope = slopes(equations, span, p, labels)
    slope = slope - span.left @ (span.left.T @ slope)
    scale = torch.linalg.vector_norm(slope, dim=1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)  # (n, 1, r)
    level = slope / scale
    eye = torch.eye(slope.shape[2], dtype=p.dtype, device=p.device)
    lower, failed = torch.linalg.cholesky_ex(level.transpose(1, 2) @ level + 1e-15 * eye)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False) / scale
    return slope, torch.where((failed == 0)[:, None, None], inverse, torch.full_like(inverse, torch.inf))
