"""Whether luck explains an agreement: one rule for all surfaces."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dosimeter.randomness import generator
from dosimeter.surfaces.assignment import assign, distances

LARGEST_CHANCE = 0.05  # up to this probability of luck, after the correction for the number of methods, an agreement is no luck
FEWEST_OF_A_GROUP = 8  # references from which on a group of them is judged by itself
LONE_DIMENSIONS = 3  # in which samples are taken to scatter where nothing shows how they do
REDIVISIONS = 10_000  # of private samples and references, for the test of their mean
NEAREST_SHARE = 1e-6  # of the usual distance: what is nearer counts as being this near
SMALLEST_EXCESS_DB = 1.0  # mean excess of the upper quarter, for references that are all alike


def correct_for_attempts(chance: float, attempts: int) -> float:
    """The probability that the best of `attempts` methods agrees as well by luck (Bonferroni)."""
    return min(1.0, chance * attempts)


def luck_words(chance: float, attempts: int) -> str:
    """How likely luck is, as the end of a sentence about an agreement."""
    counting = f", counting {attempts} methods tried" if attempts > 1 else ""
    corrected = correct_for_attempts(chance, attempts)
    said = "below one in a million" if corrected < 1e-6 else f"{corrected:.2g}"
    return f"as much agreement comes by luck with probability {said}{counting}"


def chance_of_luck(guesses: Tensor, truth: Tensor, references: Tensor, classmates: Tensor | None = None) -> float:
    """The probability that guesses (n, *shape) which know nothing of the truth (B, *shape) come as near to it as these do.

    The guesses stay, and the truth is exchanged for `references` (N, *shape): samples of the same kind that the client does not
    hold. A sample's gain is how much nearer its best guess lies than the nearest reference or the references' mean, in decibels.
    So neither the matching nor many guesses nor a dull sample make a private gain.

    Two tests compare the private gains with the references' gains. One asks whether single gains stand out (Simes 1986, over
    samples). The other divides all samples anew, and asks for the mean gain. The smaller p-value counts twice. `classmates` (N,)
    marks references of the batch's classes. Both tests must hold against them too, so that knowing the labels is no leak.
    """
    guesses, truth, references = (samples.detach().flatten(1).to(torch.float64) for samples in (guesses, truth, references))
    guesses = guesses[guesses.isfinite().all(1)]
    if len(guesses) == 0 or len(references) < 2:
        return 1.0
    center = references.mean(0, keepdim=True)
    private = _gains(guesses, truth, torch.cat([references, center])).amax(0)  # (B,)
    known = _gains(guesses, references, center, apart=True).amax(0)  # (N,)
    groups = [known]
    if classmates is not None and int(classmates.sum()) >= FEWEST_OF_A_GROUP:
        groups.append(known[classmates.to(known.device)])
    single = max(_simes([_tail(gain, group) for gain in private.tolist()]) for group in groups)
    if len(private) == 1:
        return single
    return min(1.0, 2 * min(single, max(_mean_test(private, group) for group in groups)))


def chance_without_references(guesses: Tensor, truth: Tensor, stand_ins: Tensor, center: Tensor, *, kinship: float = 1.0) -> float:
    """As `chance_of_luck` where no sample of the same kind is at hand.

    Each pair of the matching is compared with what all other pairs of a guess and a private sample gain, and with what the guesses
    gain on `stand_ins` (N, *shape), which were drawn and are not of the same kind. The larger p-value counts. In the smallest
    batches there are too few other pairs: there a sample is taken to be a random point of few dimensions. A gain is relative to the
    nearest other sample or the blind guess `center`. Each p-value is multiplied by max(n, B), the number of pairs to choose from.

    Of a single sample nothing shows how near others of its kind lie. They are taken to lie `kinship` times nearer than the stand-ins.
    """
    guesses, truth, stand_ins = (samples.detach().flatten(1).to(torch.float64) for samples in (guesses, truth, stand_ins))
    guesses = guesses[guesses.isfinite().all(1)]
    if len(guesses) == 0:
        return 1.0
    center = center.detach().flatten()[None].to(guesses)
    gains = _gains(guesses, truth, torch.cat([stand_ins, center]), apart=True)  # (n, B)
    partner = assign(guesses, truth)  # (B,)
    columns = (partner >= 0).nonzero().flatten()
    others = torch.ones_like(gains, dtype=torch.bool)
    others[partner[columns], columns] = False
    between = gains[others] if len(truth) > 1 else gains[:0].flatten()
    drawn = torch.cat([_gains(guesses, stand_ins, center, apart=True).amax(0), between])

    def chance(gain: float) -> float:
        if len(between) < FEWEST_OF_A_GROUP:
            own = 20 * math.log10(kinship) if len(truth) == 1 else 0.0
            rival = min(1.0, 10 ** (-LONE_DIMENSIONS * (gain - own) / 20))  # a random point of a ball is that near to its center
        else:
            rival = _extended_tail(gain, between, censored=len(columns))
        return min(1.0, max(gains.shape) * max(_extended_tail(gain, drawn), rival))

    return _simes([chance(gain) for gain in gains[partner[columns], columns].tolist()])


def _gains(guesses: Tensor, samples: Tensor, rivals: Tensor, apart: bool = False) -> Tensor:
    """How much nearer to each sample each guess lies than its nearest rival, in decibels: (n, m).

    `apart`: the other samples are rivals too.
    """
    reach = distances(rivals, samples).amin(0)  # (m,)
    if apart and len(samples) > 1:
        reach = torch.minimum(reach, distances(samples, samples).fill_diagonal_(torch.inf).amin(0))
    nearest = NEAREST_SHARE * float(reach.mean()) + torch.finfo(torch.float64).tiny
    return 20 * (reach.clamp(min=nearest) / distances(guesses, samples).clamp(min=nearest)).log10()


def _tail(gain: float, references: Tensor) -> float:
    """The probability that a gain of the references reaches `gain`: their share (k + 1)/(N + 1), and beyond the last one the extension."""
    reached = int((references >= gain).sum())
    share = (reached + 1) / (len(references) + 1)
    return share if reached else min(share, _extended_tail(gain, references))


def _extended_tail(gain: float, references: Tensor, censored: int = 0) -> float:
    """The tail of the references' gains as an exponential law, by the mean excess of the upper quarter.

    Knijnenburg et al., "Fewer permutations, more accurate P-values", Bioinformatics 2009, with shape 0. Near a sample of d
    dimensions, distances in decibels have that tail, with a mean excess of 8.7/d. The upper end of its 95 % interval counts.
    `censored` larger gains are missing from the references, and count as Epstein and Sobel (1953) count them.
    """
    ordered = references.sort(descending=True).values
    upper = max(1, len(ordered) // 4)
    excesses = ordered[:upper] - ordered[min(upper, len(ordered) - 1)]
    mean = float(excesses.sum() + censored * excesses[0]) / upper * (1 + 1.65 / math.sqrt(upper))
    share = (upper + censored + 1) / (len(ordered) + censored + 1)
    return min(1.0, share * math.exp((float(ordered[min(upper, len(ordered) - 1)]) - gain) / max(mean, SMALLEST_EXCESS_DB)))


def _simes(chances: list[float]) -> float:
    """One probability of luck from those of many samples: the least of n p₍ₖ₎/k over the k smallest."""
    return min((len(chances) * chance / (k + 1) for k, chance in enumerate(sorted(chances))), default=1.0)


def _mean_test(private: Tensor, references: Tensor) -> float:
    """The share of divisions of all samples in which as many have a mean gain as large as the private ones'."""
    every = torch.cat([private, references])  # (B + N,)
    every = every.clamp(min=float(every.median()))  # how bad a bad guess is says nothing
    rng = generator(0, "divisions of private and other samples", every.device)
    count = max(100, min(REDIVISIONS, 2**24 // len(every)))
    order = torch.rand(count, len(every), generator=rng, device=every.device).argsort(1)[:, : len(private)]  # (R, B)
    as_good = every[order].mean(1) >= every[: len(private)].mean() - 1e-12
    return (int(as_good.sum()) + 1) / (count + 1)
